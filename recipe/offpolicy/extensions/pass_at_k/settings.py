"""Settings of pass@k training (the section ``pass_at_k``) and their start-up checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...batch.declared_keys import Configured, Key, Rule, choice, count, flag, number
from ...correction import Problem
from ...correction.problem import set_to
from ..setting_checks import ROLLOUTS, build_settings, count_rollouts, read_values
from .estimators import OBJECTIVES, find_impossible

CHOICES = ("none", *OBJECTIVES)


@dataclass(frozen=True)
class MetricSettings:
    """Values of k to report: ``k`` up to the number of samples drawn, and ``extrapolate`` beyond it, by the fit."""

    k: Sequence[int]
    extrapolate: Sequence[int]


@dataclass(frozen=True)
class DynamicSettings:
    """Rounds of validation that sample only prompts with fewer than ``successes`` correct answers; None: one round."""

    successes: int | None
    max_samples: int
    max_rounds: int


@dataclass(frozen=True)
class BudgetSettings:
    """Distribution of rollouts: group sizes (``upsampling.allocate``) or draws (``upsampling.compute_chances``)."""

    mode: Literal["none", "group_size", "upsample"]
    least: int
    most: int
    decay: float
    equal_prompts: bool
    uniform_share: float


@dataclass(frozen=True)
class PassAtKSettings:
    """Settings of pass@k training and validation.

    Attributes:
        objective: see ``estimators.advantages``; ``none`` keeps verl's advantages.
        k: k of the objective, and of budgets.
        correct_at_least: smallest score of a correct row.
        schedule: pairs (step, k), sorted by the step from which k applies; None: ``k`` throughout. For steps at which k
            is 1, verl's own estimator trains.
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
        """Read the settings from the values of the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        fix = f"Set {section}=loo, or choose another of validation, {', '.join(OBJECTIVES)}."
        named = ("objective", "no objective is set.", fix)
        given = build_settings(cls, read_values(section, values, "pass_at_k/loo", KEYS, (_ORDER,), named))
        schedule = None if given.schedule is None else tuple((step, k) for step, k in given.schedule)
        return replace(given, schedule=schedule)

    def get_k(self, step: int) -> int:
        """Return the k that applies at a step."""
        passed = [k for start, k in self.schedule or () if start <= step]
        return passed[-1] if passed else self.k

    @property
    def all_k(self) -> tuple[int, ...]:
        """All values of k that the run trains."""
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


_ESTIMATOR = "algorithm.adv_estimator"
_KL = "algorithm.use_kl_in_reward"
_FILTER = "algorithm.filter_groups.enable"
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def find_problems(section: str, settings: PassAtKSettings, run: Configured) -> Iterator[Problem]:
    """Find conflicts between the settings and the configuration."""
    mode, key = settings.budget.mode, f"{section}.budget.mode"
    if settings.objective != "none":
        yield from _check_k(section, settings, run)
        yield from _check_objective(section, settings, run)
    if mode != "none" and run.get(_FILTER):
        reason = (
            "groups whose answers are all correct or all wrong are dropped, so the budget never receives these answers."
        )
        yield run.problem(key, reason, f"Set {_FILTER}=false, or {key}=none.", value=mode, alongside=[_FILTER])
    if mode == "group_size":
        yield from _check_group_sizes(section, settings, run)
    if mode == "upsample":
        yield from _check_draws(key, run)
    yield from _check_validation(section, settings, run)


def _check_k(section: str, settings: PassAtKSettings, run: Configured) -> Iterator[Problem]:
    n, objective, schedule = count_rollouts(run), settings.objective, settings.schedule or ()
    for k in sorted({*settings.all_k} - {1}):
        reason = find_impossible(n, k, objective)
        if reason is None and k == n and objective in ("analytic", "groups"):
            reason = f"k={k} of a group of {n}: {objective} gives only zeros."
        if reason is None:
            continue
        fit = next((each for each in range(n - 1, 1, -1) if find_impossible(n, each, objective) is None), None)
        key: str = f"{section}.k"
        value: Any = k
        sets: dict[str, Any] = {key: fit}
        if k != settings.k:
            key, value = f"{section}.schedule", [list(pair) for pair in schedule]
            sets = {key: [[step, min(each, fit or 0)] for step, each in schedule]}
        if fit is None:
            sets = {ROLLOUTS: 2 * max(settings.all_k)}
        yield run.problem(key, reason, sets=sets, value=value, alongside={ROLLOUTS: n})
        break


def _check_objective(section: str, settings: PassAtKSettings, run: Configured) -> Iterator[Problem]:
    off = f"or {section}=null."
    if (estimator := run.get(_ESTIMATOR)) != "grpo":
        why = (
            "would not run; it is another form of pass@k"
            if estimator == "grpo_passk"
            else "would not run, and neither would anything that needs it"
        )
        reason = f"{section} replaces verl's estimator, so {estimator} {why}."
        yield run.problem(_ESTIMATOR, reason, f"Set {_ESTIMATOR}=grpo, {off}")
    if run.get(_KL):
        yield run.problem(
            _KL, "the best of several rewards that include a KL is not pass@k.", f"Set {_KL}=false, {off}"
        )
    overlong, manager = "reward.reward_kwargs.overlong_buffer_cfg.enable", "reward.reward_manager.name"
    if run.get(overlong) and run.get(manager) == "dapo":
        reason = (
            "the length penalty can lower a correct answer's score below the smallest score that counts as correct."
        )
        yield run.problem(overlong, reason, f"Set {overlong}=false, {off}", alongside=[manager])
    if settings.all_k == (1,):
        key, reason = f"{section}.k", "verl's own estimator trains pass@1, so it is not replaced."
        yield run.problem(key, reason, f"Set {key} above 1, {off}", verdict="NO-OP", value=1)
    for name, mask in (run.get("correction.masks") or {}).items():
        if settings.objective == "loo_minus_one" and mask.get("when") == "negative":
            key, reason = (
                f"{section}.objective",
                f"no advantage is below 0, but the mask {name} acts only on negative advantages.",
            )
            yield run.problem(key, reason, "", {key: "loo"}, (name,), "NO-OP", value=settings.objective)


def _check_draws(key: str, run: Configured) -> Iterator[Problem]:
    def wrong(other: str, reason: str, proposed: Any) -> Problem:
        fix = f"Set {set_to(other, proposed)}, or {key}=none."
        return run.problem(key, reason, fix, value="upsample", alongside={other: run.get(other, 1)})

    if run.get(other := "data.dataloader_num_workers"):
        yield wrong(
            other, "workers load batches ahead of time, before the answers that determine the probabilities exist.", 0
        )
    if run.get(other := "data.sampler.class_path"):
        yield wrong(other, "your own sampler draws the prompts.", None)
    if run.get(other := "data.shuffle") is False:
        yield wrong(other, "prompts are read in the order of the data set.", True)
    if count_rollouts(run) == 1:
        yield wrong(ROLLOUTS, "a group of one never has both correct and wrong answers.", 8)


def _check_group_sizes(section: str, settings: PassAtKSettings, run: Configured) -> Iterator[Problem]:
    key, budget, n = f"{section}.budget.mode", settings.budget, count_rollouts(run)
    if not run.get(v1 := "trainer.use_v1") or run.get("trainer.v1.trainer_mode") != "sync":
        reason = "only verl's V1 trainer in the mode sync can sample groups of different sizes within one step."
        fix = f"Set {v1}=true and trainer.v1.trainer_mode=sync, or {key}=none."
        if run.get(v1) is None:  # before 0.9.0
            fix = f"Use verl 0.9.0 or later, or set {key}=none."
        alongside = ["trainer.v1.trainer_mode" if run.get(v1) else v1]
        yield run.problem(key, reason, fix, value=budget.mode, alongside=alongside)
    if run.get(_ESTIMATOR) == "remax":
        reason, fix = "ReMax needs one greedy answer per prompt.", f"Set {_ESTIMATOR}=grpo, or {key}=none."
        yield run.problem(key, reason, fix, value=budget.mode, alongside=[_ESTIMATOR])
    if not budget.least <= n <= budget.most:
        name = "least" if n < budget.least else "most"
        edge, reason = f"{section}.budget.{name}", f"a step has {n} rollouts per prompt on average."
        yield run.problem(edge, reason, sets={edge: n}, value=getattr(budget, name), alongside={ROLLOUTS: n})
    k = max(settings.all_k)
    if settings.objective != "none" and find_impossible(budget.least, k, settings.objective):
        reason = f"a group of {budget.least} has no advantage for k={k}."
        yield run.problem(f"{section}.budget.least", reason, verdict="NOTE", value=budget.least)


def _check_validation(section: str, settings: PassAtKSettings, run: Configured) -> Iterator[Problem]:
    dynamic, most = settings.dynamic, max(settings.metric.k, default=1)
    if settings.objective != "none" and dynamic.successes is None:
        return
    key, temperature = f"{_VALIDATION}.n", f"{_VALIDATION}.temperature"
    n, wanted = int(run.get(key) or 1), max(most, 2)
    rounds = 1 if dynamic.successes is None else max(min(dynamic.max_samples // n, dynamic.max_rounds), 1)
    if not run.get(temperature):
        reason = "all samples of a prompt are the same answer: pass@k is pass@1."
        sets = {temperature: 1.0} | ({key: wanted} if n * rounds < wanted else {})
        yield run.problem(temperature, reason, sets=sets, verdict="NO-OP")
    elif n * rounds < most and not settings.metric.extrapolate:
        reason = f"no prompt has the {most} samples that {section}.metric.k needs."
        yield run.problem(key, reason, sets={key: most}, verdict="NO-OP", value=n)
