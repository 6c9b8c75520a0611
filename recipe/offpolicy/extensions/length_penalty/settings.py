"""Settings of the length penalty, as the section ``length_penalty`` of the configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...correction import SpecError
from ...correction.problem import format_value
from ..setting_checks import Rule, check_keys, is_count, is_number, is_positive, optional
from .penalties import KINDS

Kind = Literal["none", "uniform", "group", "anchor", "reference"]
COEFFICIENT: Mapping[str, float] = {"none": 0.0, "uniform": 1e-4, "group": 0.1, "anchor": 0.01, "reference": 0.01}
"""Where ``coefficient`` is null."""
COLUMN = "extra_info."
"""Before the name of a reference length in the data set."""


@dataclass(frozen=True)
class AnchorSettings:
    """Settings of ``anchors.Anchors``; ``per``: one for each prompt, or for each data source."""

    pass_rate: float = 0.9
    min_samples: int = 16
    window: int = 64
    per: Literal["prompt", "source"] = "prompt"


@dataclass(frozen=True)
class WarmupSettings:
    """The penalty is 0 up to a step, and grows linearly to its whole over so many further steps."""

    from_step: int = 0
    steps: int = 0


@dataclass(frozen=True)
class LengthSettings:
    """Settings of one run.

    Attributes:
        kind: see ``penalties.penalties``; none: lengths are measured, and nothing is changed.
        coefficient: of the penalty.
        place: after verl's normalisation within the group, or before it, on the rewards.
        zero_variance: penalise or skip groups whose rewards agree within float32 rounding.
        applies_to: all rows, or those that are correct.
        correct_at_least: score from which a row is right.
        reference: tokens, or ``extra_info.NAME`` of the data set; None: there is none.
        most: largest penalty of a row, either way; None: any.
    """

    kind: Kind
    coefficient: float
    place: Literal["after", "before"] = "after"
    zero_variance: Literal["penalise", "skip"] = "penalise"
    applies_to: Literal["all", "correct"] = "all"
    correct_at_least: float = 1.0
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    anchor: AnchorSettings = field(default_factory=AnchorSettings)
    reference: float | str | None = None
    most: float | None = None

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> LengthSettings:
        """Read the section.

        Raises:
            SpecError: an unknown key, or a value that cannot be what was meant.
        """
        given = check_keys(section, values, _KEYS)
        if "kind" not in given:
            fix, key = f"Set {section}=anchor, or another of {', '.join(KINDS)}.", f"{section}.kind"
            raise SpecError("no kind of penalty is named.", fix, key=key, mend={key: "anchor"})
        for name, known, build in (("warmup", _WARMUP, WarmupSettings), ("anchor", _ANCHOR, AnchorSettings)):
            given[name] = build(**check_keys(f"{section}.{name}", given.get(name) or {}, known))
        if given.get("coefficient") is None:
            given["coefficient"] = COEFFICIENT[given["kind"]]
        settings = cls(**given)
        if (settings.kind == "reference") != (settings.reference is not None):
            key, kind = f"{section}.reference", f"{section}.kind"
            if settings.reference is None:
                fix = f"Set {key} to tokens, or to {COLUMN}NAME of the data set."
                raise SpecError("no length is given.", fix, key=key, beside={kind: "reference"}, mend={kind: "anchor"})
            fix = f"Set {kind}=reference, or {key}=null."
            reason, beside = "only the kind reference reads it.", {kind: settings.kind}
            raise SpecError(reason, fix, key=key, value=settings.reference, beside=beside)
        return settings

    def compute_warmup(self, step: int) -> float:
        """Compute the share of the penalty that is in force at a step, in [0, 1]."""
        past = step - self.warmup.from_step
        return float(past > 0) if self.warmup.steps == 0 else min(1.0, max(0.0, past / self.warmup.steps))


def _one_of(*choices: str) -> tuple[Any, str, str]:
    return (lambda value: value in choices), f"one of {format_value(list(choices))}", choices[0]


def _is_reference(value: object) -> bool:
    if isinstance(value, str):
        return value.startswith(COLUMN) and len(value) > len(COLUMN)
    return is_positive(value)


_WARMUP: dict[str, Rule] = {
    "from_step": (lambda value: is_count(value, 0), "a step, 0 or more", 0),
    "steps": (lambda value: is_count(value, 0), "a number of steps, 0 or more", 0),
}
_ANCHOR: dict[str, Rule] = {
    "pass_rate": (lambda value: is_number(value) and 0 < value < 1, "a share between 0 and 1, both exclusive", 0.9),
    "min_samples": (is_count, "a number of answers, 1 or more", 16),
    "window": (is_count, "a number of answers, 1 or more", 64),
    "per": _one_of("prompt", "source"),
}
_KEYS: dict[str, Rule] = {
    "kind": (lambda value: value in COEFFICIENT, f"one of {format_value(list(COEFFICIENT))}", "anchor"),
    "coefficient": (optional(lambda value: is_number(value) and value >= 0), "a number, 0 or more, or null", None),
    "place": _one_of("after", "before"),
    "zero_variance": _one_of("penalise", "skip"),
    "applies_to": _one_of("all", "correct"),
    "correct_at_least": (is_number, "a score", 1.0),
    "warmup": (optional(lambda value: isinstance(value, Mapping)), "a mapping", {}),
    "anchor": (optional(lambda value: isinstance(value, Mapping)), "a mapping", {}),
    "reference": (optional(_is_reference), f"tokens above 0, {COLUMN}NAME, or null", None),
    "most": (optional(is_positive), "a reward above 0, or null", None),
}
