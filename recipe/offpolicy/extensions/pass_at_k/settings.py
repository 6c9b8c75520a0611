"""Settings of pass@k: the section ``pass_at_k`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...batch.declared_keys import Key, Rule, choice, count, flag, number
from ...correction import SpecError
from ..setting_checks import read_values
from .training import OBJECTIVES

CHOICES = ("none", *OBJECTIVES)


@dataclass(frozen=True)
class MetricSettings:
    """Values of k to report: ``k`` within the drawn samples, ``extrapolate`` beyond, by the fit."""

    k: Sequence[int]
    extrapolate: Sequence[int]


@dataclass(frozen=True)
class DynamicSettings:
    """Rounds of validation that sample only prompts with fewer than ``successes`` right; None: one round."""

    successes: int | None
    max_samples: int
    max_rounds: int


@dataclass(frozen=True)
class BudgetSettings:
    """Distribution of rollouts: group sizes (``budget.allocate``) or draws (``upsampling.compute_chances``)."""

    mode: Literal["none", "group_size", "upsample"]
    least: int
    most: int
    decay: float
    equal_prompts: bool
    uniform_share: float


@dataclass(frozen=True)
class PassAtKSettings:
    """Settings of one run.

    Attributes:
        objective: see ``training.advantages``; none: advantages are verl's.
        k: k of the objective, and of budgets.
        correct_at_least: smallest score of a right row.
        schedule: (step, k) in increasing steps, k from that step on; None: ``k`` throughout. 1: verl's own estimator.
        seed: seed of the splits of ``groups`` and of the draws of prompts.
    """

    objective: Literal["none", "loo", "loo_minus_one", "analytic", "groups"]
    k: int
    correct_at_least: float
    schedule: Sequence[tuple[int, int]] | None
    seed: int
    metric: MetricSettings
    dynamic: DynamicSettings
    budget: BudgetSettings

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> PassAtKSettings:
        """Read the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = read_values(section, values, "pass_at_k/loo", KEYS, (_ORDER,))
        if "objective" not in values:
            fix, key = f"Set {section}=loo, or another of validation, {', '.join(OBJECTIVES)}.", f"{section}.objective"
            raise SpecError("no objective is named.", fix, key=key, proposed={key: "loo"})
        for name, build in (("metric", MetricSettings), ("dynamic", DynamicSettings), ("budget", BudgetSettings)):
            given[name] = build(**given[name])
        if given["schedule"] is not None:
            given["schedule"] = tuple((int(step), int(k)) for step, k in given["schedule"])
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


_is_count, _is_step = count("").fits, count("", 0).fits


def _are_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value)) and list(value) == sorted(set(value))


def _is_schedule(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, list | tuple) or not value:
        return False
    pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    if not pairs or not all(_is_step(step) and _is_count(k) for step, k in value):
        return False
    steps = [step for step, _ in value]
    return steps == sorted(set(steps))


KEYS = {
    "objective": choice(*CHOICES),
    "k": count("a count of 1 or more"),
    "correct_at_least": number("a score"),
    "schedule": Key(_is_schedule, "pairs [STEP, K] in rising steps, or null"),
    "seed": count("a whole number, 0 or more", 0),
    **dict.fromkeys(("metric.k", "metric.extrapolate"), Key(_are_counts, "counts of 1 or more, in rising order")),
    "dynamic.successes": count("a count of 1 or more, or null", null=True),
    "dynamic.max_samples": count("a count of 1 or more"),
    "dynamic.max_rounds": count("a count of 1 or more"),
    "budget.mode": choice("none", "group_size", "upsample"),
    "budget.least": count("a count of 1 or more"),
    "budget.most": count("a count of 1 or more"),
    "budget.decay": number("a number in [0, 1]", 0, 1),
    "budget.equal_prompts": flag(),
    "budget.uniform_share": number("a share in (0, 1)", above=0, below=1),
}
_ORDER = Rule(
    "budget.least",
    lambda values: values["budget.least"] > values["budget.most"],
    "more than most.",
    lambda values: 1,
    "budget.most",
)
