"""Settings of pass@k, as the section ``pass_at_k`` of the configuration has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...correction import SpecError
from ...correction.problem import format_value
from ..setting_checks import Rule, check_keys, is_count, is_flag, is_number, optional
from .training import OBJECTIVES

CHOICES = ("none", *OBJECTIVES)


@dataclass(frozen=True)
class MetricSettings:
    """Numbers of samples that pass@k is reported for: ``k`` within those drawn, ``extrapolate`` beyond, by the fit."""

    k: Sequence[int] = (1, 2, 4, 8, 16)
    extrapolate: Sequence[int] = (64, 256, 1024)


@dataclass(frozen=True)
class DynamicSettings:
    """Rounds of validation that sample only prompts with fewer than ``successes`` right; None: one round."""

    successes: int | None = None
    max_samples: int = 64
    max_rounds: int = 8


@dataclass(frozen=True)
class BudgetSettings:
    """Where rollouts go: by group sizes, see ``budget.allocate``, or by draws, see ``upsampling.compute_chances``."""

    mode: Literal["none", "group_size", "upsample"] = "none"
    least: int = 2
    most: int = 32
    decay: float = 0.9
    equal_prompts: bool = True
    uniform_share: float = 0.2


@dataclass(frozen=True)
class PassAtKSettings:
    """Settings of one run.

    Attributes:
        objective: see ``training.advantages``; none: advantages are verl's.
        k: of the objective, and of budgets.
        correct_at_least: score from which a row is right.
        schedule: (step, k) in rising steps, k from that step on; None: ``k`` throughout. 1: verl's own estimator.
        seed: of the deals of ``groups`` and of the draws of prompts.
    """

    objective: Literal["none", "loo", "loo_minus_one", "analytic", "groups"]
    k: int = 4
    correct_at_least: float = 1.0
    schedule: Sequence[tuple[int, int]] | None = None
    seed: int = 0
    metric: MetricSettings = field(default_factory=MetricSettings)
    dynamic: DynamicSettings = field(default_factory=DynamicSettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> PassAtKSettings:
        """Read the section.

        Raises:
            SpecError: an unknown key, or a value that cannot be what was meant.
        """
        given = check_keys(section, values, _KEYS)
        if "objective" not in given:
            fix, key = f"Set {section}=loo, or another of validation, {', '.join(OBJECTIVES)}.", f"{section}.objective"
            raise SpecError("no objective is named.", fix, key=key, mend={key: "loo"})
        for name, known, build in _PARTS:
            part = check_keys(f"{section}.{name}", given.get(name) or {}, known)
            read: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in part.items()}
            given[name] = build(**read)
        if given.get("schedule") is not None:
            given["schedule"] = tuple((int(step), int(k)) for step, k in given["schedule"])
        budget = given["budget"]
        if budget.least > budget.most:
            key, most = f"{section}.budget.least", f"{section}.budget.most"
            raise SpecError("more than most.", key=key, value=budget.least, beside={most: budget.most}, mend={key: 1})
        return cls(**given)

    def get_k(self, step: int) -> int:
        """Return k at a step."""
        passed = [k for start, k in self.schedule or () if start <= step]
        return passed[-1] if passed else self.k

    @property
    def all_k(self) -> tuple[int, ...]:
        """All k that the run trains."""
        first = () if self.schedule and self.schedule[0][0] <= 1 else (self.k,)
        return (*first, *(k for _, k in self.schedule or ()))


def _one_of(*choices: str) -> tuple[Any, str, str]:
    return (lambda value: value in choices), f"one of {format_value(list(choices))}", choices[0]


def _counts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_count, value)) and list(value) == sorted(set(value))


def _is_schedule(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    if not pairs or not all(is_count(step, 0) and is_count(k) for step, k in value):
        return False
    steps = [step for step, _ in value]
    return steps == sorted(set(steps))


_RISING = "counts of 1 or more, in rising order"
_METRIC: dict[str, Rule] = {"k": (_counts, _RISING, [1]), "extrapolate": (_counts, _RISING, [])}
_DYNAMIC: dict[str, Rule] = {
    "successes": (optional(is_count), "a count of 1 or more, or null", None),
    "max_samples": (is_count, "a count of 1 or more", 64),
    "max_rounds": (is_count, "a count of 1 or more", 8),
}
_BUDGET: dict[str, Rule] = {
    "mode": _one_of("none", "group_size", "upsample"),
    "least": (is_count, "a count of 1 or more", 2),
    "most": (is_count, "a count of 1 or more", 32),
    "decay": (lambda value: is_number(value) and 0 <= value <= 1, "a number in [0, 1]", 0.9),
    "equal_prompts": (is_flag, "true or false", True),
    "uniform_share": (lambda value: is_number(value) and 0 < value < 1, "a share between 0 and 1, both exclusive", 0.2),
}
_PARTS = (
    ("metric", _METRIC, MetricSettings),
    ("dynamic", _DYNAMIC, DynamicSettings),
    ("budget", _BUDGET, BudgetSettings),
)
_MAPPING: Rule = (optional(lambda value: isinstance(value, Mapping)), "a mapping", {})
_KEYS: dict[str, Rule] = {
    "objective": (lambda value: value in CHOICES, f"one of {format_value(list(CHOICES))}", "loo"),
    "k": (is_count, "a count of 1 or more", 4),
    "correct_at_least": (is_number, "a score", 1.0),
    "schedule": (optional(_is_schedule), "pairs [STEP, K] in rising steps, or null", None),
    "seed": (lambda value: is_count(value, 0), "a whole number, 0 or more", 0),
    "metric": _MAPPING,
    "dynamic": _MAPPING,
    "budget": _MAPPING,
}
