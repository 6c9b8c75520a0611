"""Settings of on-policy distillation: the section ``opd`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from ...batch.declared_keys import Key, Rule, choice, count, flag, number
from ...correction import SpecError
from ...fault_tolerance.redaction import redact_text
from ..setting_checks import read_values

Mode = Literal["advantage", "loss"]
COEF: Mapping[str, float] = {"advantage": 1.0, "loss": 0.01}
"""Factor of the signal if ``coef`` is null."""


@dataclass(frozen=True)
class TeacherSettings:
    """Addresses of the teacher, and limits of the requests to it.

    Attributes:
        urls: addresses of servers of one model; requests go round-robin.
        headers: header of each request -> the environment variable that holds its value.
        model: served name; None: the only served model.
        tokenizer: folder or hub name whose whole vocabulary is compared; None: the server's is probed.
        concurrency: number of requests in flight.
        timeout: seconds for the rows of one step.
        probe_every: steps after which rows are scored again and must get the same answer; None: never.
        retries: number of times that a request is sent again, to another address if there is one.
        other_template: a chat template other than the student's is intended.
    """

    urls: tuple[str, ...]
    model: str | None = None
    tokenizer: str | None = None
    concurrency: int = 32
    timeout: float = 600.0
    probe_every: int | None = 50
    retries: int = 2
    other_template: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[str, ...]:
        """The addresses without users, passwords and keys, for messages."""
        return tuple(map(redact_text, self.urls))


@dataclass(frozen=True)
class EligibleSettings:
    """Settings of ``eligibility.eligible``."""

    passed_above: float
    max_pass_rate: float
    rows: str


@dataclass(frozen=True)
class OpdSettings:
    """Settings of one run.

    Attributes:
        mode: ``advantage`` replaces the advantages of eligible tokens by K1, ``loss`` adds K2.
        coef: factor of the signal.
        horizon: number of first response tokens that take part; None: all.
        max_gap: bound of |s - t|, in nats.
        scale: divisor of the advantages: ``std``, the bounded gaps' root mean square, ``none``, or a number.
        corrected: weight and masks of the correction act on the term like on the policy term.
        extreme: nats from which a gap counts as extreme.
    """

    mode: Mode
    teacher: TeacherSettings
    eligible: EligibleSettings
    coef: float
    horizon: int | None
    max_gap: float
    scale: str | float
    corrected: bool
    extreme: float

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> OpdSettings:
        """Read the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = read_values(section, values, "opd/advantage", KEYS, _RULES)
        teacher, eligible = given.pop("teacher"), EligibleSettings(**given.pop("eligible"))
        urls, mode = teacher.pop("url"), f"{section}.mode"
        if urls is None:
            fix = f"Start one with scripts/teacher.sh, and set {section}.teacher.url=http://HOST:PORT."
            raise SpecError("no teacher is named.", fix, key=f"{section}.teacher.url")
        headers = teacher["headers"] = teacher["headers"] or {}
        if not all(isinstance(each, str) and each.isidentifier() for each in headers.values()):
            raise SpecError(f"expected {_HEADERS}.", key=f"{section}.teacher.headers", value=headers)
        if "mode" not in values:
            fix = "Set opd=advantage or opd=loss."
            raise SpecError("neither advantage nor loss.", fix, key=mode, proposed={mode: "advantage"})
        if given["coef"] is None:
            given["coef"] = COEF[given["mode"]]
        return cls(teacher=TeacherSettings(urls=_addresses(urls), **teacher), eligible=eligible, **given)


def _addresses(given: str | list[str]) -> tuple[str, ...]:
    return tuple(each.rstrip("/").removesuffix("/v1") for each in ([given] if isinstance(given, str) else given))


def _are_addresses(value: Any) -> bool:
    return value is None or all(map(_is_address, value if isinstance(value, list) and value else [value]))


def _is_address(value: object) -> bool:
    return isinstance(value, str) and urlsplit(value).scheme in ("http", "https") and bool(urlsplit(value).netloc)


def _is_scale(value: Any) -> bool:
    return value in ("std", "none") or number("", above=0).fits(value)


_HEADERS = "headers, each with the name of the environment variable that holds its value"
_TEXT = Key(lambda value: value is None or isinstance(value, str), "a name, a folder or null")
KEYS = {
    "mode": choice(*COEF),
    "teacher.url": Key(_are_addresses, "an address such as http://127.0.0.1:8100, or a list of them"),
    "teacher.model": _TEXT,
    "teacher.tokenizer": _TEXT,
    "teacher.concurrency": count("a number of requests, 1 or more"),
    "teacher.timeout": number("seconds above 0", above=0),
    "teacher.probe_every": count("a number of steps, 1 or more, or null", null=True),
    "teacher.retries": count("a number of times, 0 or more", 0),
    "teacher.other_template": flag(),
    "teacher.headers": Key(lambda value: value is None, _HEADERS),
    "eligible.passed_above": number("a reward"),
    "eligible.max_pass_rate": number("a share in [0, 1]", 0, 1),
    "eligible.rows": choice("failed", "all"),
    "coef": number("a number above 0, or null", above=0, null=True),
    "horizon": count("a number of tokens, 1 or more, or null", null=True),
    "max_gap": number("nats above 0: failed rows of a far teacher have gaps of many nats", above=0),
    "scale": Key(_is_scale, "std, none or a number above 0"),
    "corrected": flag(),
    "extreme": number("nats above 0", above=0),
}
_RULES = (
    Rule(
        "corrected",
        lambda values: values["mode"] == "advantage" and not values["corrected"],
        "an advantage is part of the policy term, which weight and masks always act on.",
        lambda values: True,
        "mode",
    ),
    Rule(
        "scale",
        lambda values: values["mode"] == "loss" and values["scale"] not in ("std", "none"),
        "only advantages are divided by it.",
        lambda values: "std",
        "mode",
    ),
)
