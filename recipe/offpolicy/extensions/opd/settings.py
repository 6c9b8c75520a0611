"""Settings of on-policy distillation, as the section ``opd`` of the configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from ...correction import SpecError
from ...correction.problem import format_value
from ...fault_tolerance.redaction import redact_text
from ..setting_checks import Rule, check_keys, is_count, is_flag, is_number, is_positive, optional

Mode = Literal["advantage", "loss"]
COEF: Mapping[str, float] = {"advantage": 1.0, "loss": 0.01}
"""Factor of the signal where ``coef`` is null."""


@dataclass(frozen=True)
class TeacherSettings:
    """Addresses of the teacher, and limits of the requests to it.

    Attributes:
        urls: addresses of servers of one model; requests go round-robin.
        headers: header of each request -> the environment variable that holds its value.
        model: served name; None: the only one that is served.
        tokenizer: folder or hub name whose vocabulary is compared whole; None: the server's is probed.
        concurrency: requests in flight.
        timeout: seconds for the rows of one step.
        probe_every: steps after which rows are scored again, and have to get the same answer; None: never.
        retries: times that a request is sent again, to another address if there is one.
        other_template: says that a chat template other than the student's is meant.
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

    passed_above: float = 0.0
    max_pass_rate: float = 0.25
    rows: str = "failed"


@dataclass(frozen=True)
class OpdSettings:
    """Settings of one run.

    Attributes:
        mode: ``advantage`` replaces the advantages of eligible tokens by K1, ``loss`` adds K2.
        coef: factor of the signal.
        horizon: first tokens of a response that take part; None: all.
        max_gap: nats that |s - t| counts as at most.
        scale: ``std``, the bounded gaps' root mean square, ``none``, or a number, by which advantages are divided.
        corrected: weight and masks of the correction act on the term as on the policy term.
        extreme: nats from which a gap counts as extreme.
    """

    mode: Mode
    teacher: TeacherSettings
    eligible: EligibleSettings = field(default_factory=EligibleSettings)
    coef: float = 1.0
    horizon: int | None = None
    max_gap: float = 5.0
    scale: str | float = "std"
    corrected: bool = True
    extreme: float = 5.0

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> OpdSettings:
        """Read the section.

        Raises:
            SpecError: an unknown key, or a value that cannot be what was meant.
        """
        given = check_keys(section, values, _KEYS)
        teacher = check_keys(f"{section}.teacher", given.pop("teacher", None) or {}, _TEACHER)
        urls = teacher.pop("url", None)
        if urls is None:
            raise SpecError(
                "no teacher is named.",
                f"Start one with scripts/teacher.sh, and set {section}.teacher.url=http://HOST:PORT.",
                key=f"{section}.teacher.url",
            )
        eligible = check_keys(f"{section}.eligible", given.pop("eligible", None) or {}, _ELIGIBLE)
        if "mode" not in given:
            fix, mode = "Set opd=advantage or opd=loss.", f"{section}.mode"
            raise SpecError("neither advantage nor loss.", fix, key=mode, mend={mode: "advantage"})
        if given.get("coef") is None:
            given["coef"] = COEF[given["mode"]]
        settings = cls(
            teacher=TeacherSettings(urls=_addresses(urls), **teacher), eligible=EligibleSettings(**eligible), **given
        )
        settings._check(section)
        return settings

    def _check(self, section: str) -> None:
        """Refuse what would have no effect in this mode."""
        if self.mode == "advantage" and not self.corrected:
            raise SpecError(
                "an advantage is part of the policy term, which weight and masks always act on.",
                key=f"{section}.corrected",
                value=False,
                beside={f"{section}.mode": self.mode},
                mend={f"{section}.corrected": True},
            )
        if self.mode == "loss" and self.scale not in ("std", "none"):
            raise SpecError(
                "only advantages are divided by it.",
                key=f"{section}.scale",
                value=self.scale,
                beside={f"{section}.mode": self.mode},
                mend={f"{section}.scale": "std"},
            )


def _addresses(given: str | list[str]) -> tuple[str, ...]:
    return tuple(each.rstrip("/").removesuffix("/v1") for each in ([given] if isinstance(given, str) else given))


def _is_address(value: object) -> bool:
    return isinstance(value, str) and urlsplit(value).scheme in ("http", "https") and bool(urlsplit(value).netloc)


def _names_variables(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, str) and each.isidentifier() for each in value.values())


_TEACHER: Mapping[str, Rule] = {
    "url": (
        optional(lambda value: all(map(_is_address, value if isinstance(value, list) and value else [value]))),
        "an address such as http://127.0.0.1:8100, or a list of them",
        "http://127.0.0.1:8100",
    ),
    "model": (optional(lambda value: isinstance(value, str)), "a served name or null", None),
    "tokenizer": (optional(lambda value: isinstance(value, str)), "a folder, a hub name or null", None),
    "concurrency": (is_count, "a number of requests, 1 or more", 32),
    "timeout": (is_positive, "seconds above 0", 600),
    "probe_every": (optional(is_count), "a number of steps, 1 or more, or null", 50),
    "retries": (lambda value: value == 0 or is_count(value), "a number of times, 0 or more", 2),
    "other_template": (is_flag, "true or false", False),
    "headers": (_names_variables, "headers, each with the name of the environment variable that holds its value", {}),
}
_ELIGIBLE = {
    "passed_above": (is_number, "a reward", 0.0),
    "max_pass_rate": (lambda value: is_number(value) and 0 <= value <= 1, "a share in [0, 1]", 0.25),
    "rows": (lambda value: value in ("failed", "all"), "failed or all", "failed"),
}
_KEYS = {
    "mode": (lambda value: value in COEF, f"one of {format_value(list(COEF))}", "advantage"),
    "teacher": (optional(lambda value: isinstance(value, Mapping)), "a mapping", {}),
    "eligible": (optional(lambda value: isinstance(value, Mapping)), "a mapping", {}),
    "coef": (optional(is_positive), "a number above 0, or null", None),
    "horizon": (optional(is_count), "a number of tokens, 1 or more, or null", None),
    "max_gap": (is_positive, "nats above 0: failed rows of a far teacher have gaps of many nats", 5.0),
    "scale": (lambda value: value in ("std", "none") or is_positive(value), "std, none or a number above 0", "std"),
    "corrected": (is_flag, "true or false", True),
    "extreme": (is_positive, "nats above 0", 5.0),
}
