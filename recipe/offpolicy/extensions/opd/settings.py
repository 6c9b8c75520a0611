"""Settings of on-policy distillation (the section ``opd`` of the configuration)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from ...batch.declared_keys import Key, Rule, choice, count, number
from ...correction import SpecError
from ...correction.problem import CheckError
from ...fault_tolerance.redaction import HIDDEN, redact_text
from ..setting_checks import SectionSettings, declare_keys

COEF = {"advantage": 1.0, "loss": 0.01}
"""Default factor of the signal, used if ``coef`` is null."""


_HEADERS = "headers, each with the name of the environment variable that holds its value, or null"
_API_KEY = "the name of the environment variable that holds the key, or null"
_TEXT = Key(lambda value: value is None or isinstance(value, str), "a name, a folder or null")


@dataclass(frozen=True)
class TeacherSettings:
    """Addresses of one teacher, and limits on the requests sent there.

    Attributes:
        urls: addresses of servers that all serve the same model; requests are distributed round-robin.
        api_key: environment variable with the key, sent as ``Authorization: Bearer``; None for no key.
        headers: maps each header of the requests to the environment variable that contains its value.
        model: name of the served model; None if the server serves only one model.
        tokenizer: folder or hub name of the teacher's tokenizer, whose whole vocabulary is then compared; if None, a
            few strings are sent to the server's tokenizer instead.
        concurrency: number of requests in flight.
        timeout: seconds allowed for scoring the rows of one step.
        probe_every: number of steps between checks that rows scored again receive the same scores; None: never.
        retries: number of times that a failed request is sent again, to another address if there is one.
        other_template: True if the teacher's chat template intentionally differs from the student's.
    """

    urls: tuple[str, ...]
    model: Annotated[str | None, _TEXT] = None
    tokenizer: Annotated[str | None, _TEXT] = None
    concurrency: Annotated[int, count("a number of requests, 1 or more")] = 32
    timeout: Annotated[float, number("seconds above 0", above=0)] = 600.0
    probe_every: Annotated[int | None, count("a number of steps, 1 or more, or null", null=True)] = 50
    retries: Annotated[int, count("a number of times, 0 or more", 0)] = 2
    other_template: bool = False
    # ``_read_teacher`` checks these two keys, because its messages must not show the values.
    api_key: Annotated[str | None, Key(lambda value: True, _API_KEY)] = None
    headers: Annotated[Mapping[str, str], Key(lambda value: True, _HEADERS)] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[str, ...]:
        """The addresses as shown in messages: without user names, passwords and keys."""
        return tuple(map(redact_text, self.urls))


@dataclass(frozen=True)
class EligibleSettings:
    """Settings that select the rollouts to distil; see ``signal.eligible``."""

    passed_above: Annotated[float, number("a reward")]
    max_pass_rate: Annotated[float, number("a share in [0, 1]", 0, 1)]
    rows: Literal["failed", "all"]


_SCHEDULED = ("schedule.by", ...)


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of the schedule of ``coef``; see ``signal.compute_factor``.

    Attributes:
        by: the quantity that ``coef`` follows; None: ``coef`` is constant.
    """

    by: Annotated[str | None, choice("step", "pass_rate", "gap", null="for a constant coefficient")]
    start: Annotated[float | None, number("a number, or null", null=True, read_with=_SCHEDULED)]
    end: Annotated[float | None, number("a number, or null", null=True, read_with=_SCHEDULED)]
    final: Annotated[float, number("a factor, 0 or more", 0, read_with=_SCHEDULED)]


def _is_scale(value: Any) -> bool:
    return value in ("std", "mean_std", "none") or number("", above=0).fits(value)


@dataclass(frozen=True)
class OpdSettings(SectionSettings):
    """Settings of on-policy distillation.

    Attributes:
        teachers: the teacher of each data source; the key "" stands for all other sources.
        mode: ``advantage`` replaces the advantages of eligible tokens with K1; ``loss`` adds K2.
        coef: factor of the signal.
        horizon: number of response tokens to distil, counted from the first; None: all.
        max_gap: bound of |s - t|, in nats.
        schedule: how ``coef`` changes during training.
        scale: divisor of the advantages: ``std``, the root mean square of the bounded gaps; ``mean_std``, their
            standard deviation about the mean, which is subtracted first; ``none``; or a number.
        corrected: whether the correction's weight and masks apply to this term, as they do to the policy term.
        extreme: size in nats above which a gap counts as extreme.
    """

    option, needed = "opd/advantage", "mode"
    rules = (
        Rule(
            "corrected",
            lambda values: values["mode"] == "advantage" and not values["corrected"],
            "an advantage is part of the policy term, so the weight and the masks always apply to it.",
            lambda values: True,
            "mode",
        ),
        Rule(
            "scale",
            lambda values: values["mode"] == "loss" and values["scale"] not in ("std", "none"),
            "only advantages are divided by the scale.",
            lambda values: "std",
            "mode",
        ),
    )
    mode: Literal["advantage", "loss"]
    teachers: Mapping[str, TeacherSettings]
    eligible: EligibleSettings
    coef: Annotated[float, number("a number above 0, or null", above=0, null=True)]
    schedule: ScheduleSettings
    horizon: Annotated[int | None, count("a number of tokens, 1 or more, or null", null=True)]
    max_gap: Annotated[
        float,
        number(
            "a number of nats above 0, because a teacher that differs strongly from the student has gaps of many nats",
            above=0,
        ),
    ]
    scale: Annotated[str | float, Key(_is_scale, "std, mean_std, none or a number above 0")]
    corrected: bool
    extreme: Annotated[float, number("nats above 0", above=0)]

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """Map each key of the section to its declaration."""
        own = super().keys()
        teacher = {"teacher.url": _URL, **declare_keys(TeacherSettings, "teacher."), "teacher.sources": _SOURCES}
        return {"mode": own.pop("mode")} | teacher | own

    @property
    def shown(self) -> str:
        """The addresses of all teachers, as shown in messages."""
        return ", ".join(url for teacher in self.teachers.values() for url in teacher.shown)

    @classmethod
    def from_mapping(cls, section: str, values: Any) -> OpdSettings:
        """Build the settings from the values of the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = cls.read(section, values)
        teacher, at = given.pop("teacher"), f"{section}.teacher"
        sources = teacher.pop("sources") or {}
        teachers = {} if teacher["url"] is None else {"": _read_teacher(at, teacher)}
        for name, own in sources.items():
            of_source = f"{at}.sources.{name}"
            if not isinstance(own, Mapping) or own.get("url") is None or "sources" in own:
                fix = f"Set {of_source}.url=http://HOST:PORT."
                raise SpecError("expected a mapping with the keys of a teacher, including url.", fix, key=of_source)
            try:
                cls.read(section, {"mode": given["mode"], "teacher": own})
            except CheckError as error:
                raise CheckError(
                    replace(each, key=each.key.replace(at, of_source, 1), fix="", overrides=())
                    for each in error.problems
                ) from None
            teachers[str(name)] = _read_teacher(of_source, {**teacher, **own})
        if not teachers:
            fix = f"Start one with scripts/teacher.sh, and set {section}.teacher.url=http://HOST:PORT."
            raise SpecError("no teacher is named.", fix, key=f"{section}.teacher.url")
        found = cls.build(given | {"teachers": teachers})
        schedule = found.schedule
        if schedule.by is not None and (None in (schedule.start, schedule.end) or schedule.start == schedule.end):
            key, fix = f"{section}.schedule", f"Set {section}.schedule.start and {section}.schedule.end."
            raise SpecError(f"by={schedule.by} needs a start and a different end.", fix, key=key)
        return found if found.coef is not None else replace(found, coef=COEF[found.mode])


def _read_teacher(path: str, values: Mapping[str, Any]) -> TeacherSettings:
    """Read one teacher. Messages name headers but never show their values, which may be secret.

    Raises:
        SpecError: the value of a header, or of ``api_key``, is not the name of an environment variable.
    """
    headers = values["headers"] or {}
    if not isinstance(headers, Mapping) or not all(map(_is_variable, headers.values())):
        raise SpecError(f"expected {_HEADERS}.", key=f"{path}.headers", value=HIDDEN)
    if values["api_key"] is not None and not _is_variable(values["api_key"]):
        raise SpecError(f"expected {_API_KEY}.", key=f"{path}.api_key", value=HIDDEN)
    rest = {name: value for name, value in values.items() if name not in ("url", "headers")}
    given = [values["url"]] if isinstance(values["url"], str) else values["url"]
    urls = tuple(each.rstrip("/").removesuffix("/v1") for each in given)
    return TeacherSettings(urls=urls, headers=dict(headers), **rest)


def _is_variable(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _are_addresses(value: Any) -> bool:
    return value is None or all(map(_is_address, value if isinstance(value, list) and value else [value]))


def _is_address(value: object) -> bool:
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unmatched brackets, or a port above 65535
        return False


_URL = Key(_are_addresses, "an address such as http://127.0.0.1:8100, or a list of them")
_SOURCES = Key(
    lambda value: value is None or isinstance(value, Mapping),
    "data sources, each with the keys of its teacher, or null",
)
