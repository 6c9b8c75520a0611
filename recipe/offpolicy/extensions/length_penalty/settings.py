"""Settings of the length penalty: the section ``length_penalty`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...batch.declared_keys import Key, choice, count, number
from ...correction import SpecError
from ..setting_checks import read_values
from .penalties import KINDS

Kind = Literal["none", "uniform", "group", "anchor", "reference"]
COEFFICIENT: Mapping[str, float] = {"none": 0.0, "uniform": 1e-4, "group": 0.1, "anchor": 0.01, "reference": 0.01}
"""Values used if ``coefficient`` is null."""
COLUMN = "extra_info."
"""Prefix of a reference length's name in the data set."""


@dataclass(frozen=True)
class AnchorSettings:
    """Settings of ``anchors.Anchors``; ``per``: one anchor per prompt, or per data source."""

    pass_rate: float
    min_samples: int
    window: int
    per: Literal["prompt", "source"]


@dataclass(frozen=True)
class WarmupSettings:
    """The penalty is 0 up to a step, and then grows linearly to its full value over the given number of steps."""

    from_step: int
    steps: int


@dataclass(frozen=True)
class ClassSettings:
    """Settings of ``fixed_classes``; ``from_step``: fixed by the first validation from it on; None: never."""

    from_step: int | None
    samples: int
    easy_above: float
    hard_below: float


@dataclass(frozen=True)
class LeaveOutSettings:
    """Prompts with a pass rate below ``below`` in the file ``dump`` are not trained on; None: all are."""

    dump: str | None
    below: float


@dataclass(frozen=True)
class LengthSettings:
    """Settings of one run.

    Attributes:
        kind: see ``penalties.penalties``; none: lengths are measured, and nothing is changed.
        coefficient: factor of the penalty.
        place: after verl's normalisation within the group, or before it, on the rewards.
        zero_variance: penalise or skip groups whose rewards agree within float32 rounding.
        applies_to: all rows, or only the correct ones.
        correct_at_least: smallest score of a right row.
        reference: tokens, or ``extra_info.NAME`` of the data set; None: there is none.
        most: largest absolute penalty of a row; None: no limit.
        truncated: keep answers of the maximum length in the loss, or drop them: their advantage is 0.
    """

    kind: Kind
    coefficient: float
    place: Literal["after", "before"]
    zero_variance: Literal["penalise", "skip"]
    applies_to: Literal["all", "correct"]
    correct_at_least: float
    warmup: WarmupSettings
    anchor: AnchorSettings
    reference: float | str | None
    most: float | None
    truncated: Literal["keep", "drop"]
    classes: ClassSettings
    leave_out: LeaveOutSettings

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> LengthSettings:
        """Read the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = read_values(section, values, "length_penalty/anchor", KEYS)
        key, kind = f"{section}.reference", f"{section}.kind"
        if "kind" not in values:
            fix = f"Set {section}=anchor, or another of {', '.join(KINDS)}."
            raise SpecError("no kind of penalty is named.", fix, key=kind, proposed={kind: "anchor"})
        if given["kind"] == "reference" and given["reference"] is None:
            fix = f"Set {key} to tokens, or to {COLUMN}NAME of the data set."
            raise SpecError(
                "no length is given.", fix, key=key, alongside={kind: "reference"}, proposed={kind: "anchor"}
            )
        if given["coefficient"] is None:
            given["coefficient"] = COEFFICIENT[given["kind"]]
        for name, build in _NESTED.items():
            given[name] = build(**given[name])
        return cls(**given)

    def compute_warmup(self, step: int) -> float:
        """Compute the factor of the penalty at a step, in [0, 1]."""
        past = step - self.warmup.from_step
        return float(past > 0) if self.warmup.steps == 0 else min(1.0, max(0.0, past / self.warmup.steps))


_NESTED: Mapping[str, type] = {
    "warmup": WarmupSettings,
    "anchor": AnchorSettings,
    "classes": ClassSettings,
    "leave_out": LeaveOutSettings,
}


def _is_reference(value: Any) -> bool:
    named = isinstance(value, str) and value.startswith(COLUMN) and value != COLUMN
    return named or number("tokens", above=0, null=True).fits(value)


KEYS = {
    "kind": choice(*COEFFICIENT),
    "coefficient": number("a number, 0 or more, or null", 0, null=True),
    "place": choice("after", "before"),
    "zero_variance": choice("penalise", "skip"),
    "applies_to": choice("all", "correct"),
    "correct_at_least": number("a score"),
    "warmup.from_step": count("a step, 0 or more", 0),
    "warmup.steps": count("a number of steps, 0 or more", 0),
    "anchor.pass_rate": number("a share in (0, 1)", above=0, below=1),
    "anchor.min_samples": count("a number of answers, 1 or more"),
    "anchor.window": count("a number of answers, 1 or more"),
    "anchor.per": choice("prompt", "source"),
    "reference": Key(_is_reference, f"tokens above 0, {COLUMN}NAME, or null", ("kind", "reference")),
    "most": number("a reward above 0, or null", above=0, null=True),
    "truncated": choice("keep", "drop"),
    "classes.from_step": count("a step, 0 or more, or null", 0, null=True),
    "classes.samples": count("a number of answers, 1 or more", read_with=("classes.from_step", ...)),
    "classes.easy_above": number("a share in [0, 1)", 0, below=1, read_with=("classes.from_step", ...)),
    "classes.hard_below": number("a share in (0, 1]", most=1, above=0, read_with=("classes.from_step", ...)),
    "leave_out.dump": Key(lambda value: value is None or (isinstance(value, str) and value != ""), "a file, or null"),
    "leave_out.below": number("a share in (0, 1]", most=1, above=0, read_with=("leave_out.dump", ...)),
}
