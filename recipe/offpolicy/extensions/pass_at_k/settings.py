"""Settings of pass@k training (the section ``pass_at_k``) and their start-up checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ...batch.declared_keys import Configured, Key, Rule, count, number
from ...correction import Problem
from ...correction.problem import set_to
from ..setting_checks import ROLLOUTS, SectionSettings, count_rollouts
from .training import find_impossible

_is_count, _is_step = count("").fits, count("", 0).fits


def _are_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value)) and list(value) == sorted(set(value))


def _is_schedule(value: Any) -> bool:
    if value is None:
        return True
    try:
        steps, ks = zip(*value, strict=True)
    except (TypeError, ValueError):  # not pairs
        return False
    return all(map(_is_step, steps)) and all(map(_is_count, ks)) and list(steps) == sorted(set(steps))


Count = Annotated[int, count("a count of 1 or more")]
Counts = Annotated[Sequence[int], Key(_are_counts, "counts of 1 or more, in increasing order")]


@dataclass(frozen=True)
class MetricSettings:
    """Values of k to report: ``k`` is estimated from the samples, ``extrapolate`` from the fit."""

    k: Counts
    extrapolate: Counts


@dataclass(frozen=True)
class DynamicSettings:
    """Rounds of validation that sample only prompts with fewer than ``successes`` correct answers; None: one round."""

    successes: Annotated[int | None, count("a count of 1 or more, or null", null=True)]
    max_samples: Count
    max_rounds: Count


@dataclass(frozen=True)
class BudgetSettings:
    """How rollouts are distributed: group sizes (``training.allocate``) or draws (``training.compute_chances``)."""

    mode: Literal["none", "group_size", "upsample"]
    least: Count
    most: Count
    decay: Annotated[float, number("a number in [0, 1]", 0, 1)]
    equal_prompts: bool
    uniform_share: Annotated[float, number("a share in (0, 1)", above=0, below=1)]


@dataclass(frozen=True)
class PassAtKSettings(SectionSettings):
    """Settings of pass@k training and validation.

    Attributes:
        objective: see ``training.advantages``; ``none`` keeps verl's advantages.
        k: the k of pass@k, for the objective and for budgets.
        correct_at_least: minimum score for a row to count as correct.
        schedule: pairs (step, k), sorted by the step from which k applies; None keeps ``k`` for the whole run. While k
            is 1, verl's own estimator computes the advantages.
        seed: seed for the random splits of the objective ``groups`` and for the draws of prompts.
    """

    option, needed = "pass_at_k/loo", "objective"
    rules = (
        Rule(
            "budget.least",
            lambda values: values["budget.least"] > values["budget.most"],
            "more than most.",
            lambda values: 1,
            "budget.most",
        ),
    )
    objective: Literal["none", "loo", "loo_minus_one", "analytic", "groups"]
    k: Count
    correct_at_least: Annotated[float, number("a score")]
    schedule: Annotated[
        Sequence[Sequence[int]] | None, Key(_is_schedule, "pairs [STEP, K] with increasing steps, or null")
    ]
    seed: Annotated[int, count("a whole number, 0 or more", 0)]
    metric: MetricSettings
    dynamic: DynamicSettings
    budget: BudgetSettings

    def get_k(self, step: int) -> int:
        """Return the k that applies at a step."""
        passed = [k for start, k in self.schedule or () if start <= step]
        return passed[-1] if passed else self.k

    @property
    def all_k(self) -> tuple[int, ...]:
        """All values of k that the run uses for training."""
        first = () if self.schedule and self.schedule[0][0] <= 1 else (self.k,)
        return (*first, *(k for _, k in self.schedule or ()))


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
        reason = "groups with only correct or only wrong answers are dropped, so the budget never receives them."
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
            reason = f"with k={k} and groups of {n}, all advantages of {objective} are 0."
        if reason is None:
            continue
        fit = next((each for each in range(n - 1, 1, -1) if find_impossible(n, each, objective) is None), None)
        key, value, sets = f"{section}.k", k, {f"{section}.k": fit}
        if k != settings.k:
            key, value = f"{section}.schedule", [list(pair) for pair in schedule]  # type: ignore[assignment]
            sets = {key: [[step, min(each, fit or 0)] for step, each in schedule]}  # type: ignore[dict-item]
        if fit is None:
            sets = {ROLLOUTS: 2 * max(settings.all_k)}
        yield run.problem(key, reason, sets=sets, value=value, alongside={ROLLOUTS: n})
        break


def _check_objective(section: str, settings: PassAtKSettings, run: Configured) -> Iterator[Problem]:
    off = f"or {section}=null."
    overlong, manager = "reward.reward_kwargs.overlong_buffer_cfg.enable", "reward.reward_manager.name"
    if (estimator := run.get(_ESTIMATOR)) != "grpo":
        reason = f"{section} replaces verl's estimator, so {estimator} would not run."
        yield run.problem(_ESTIMATOR, reason, f"Set {_ESTIMATOR}=grpo, {off}")
    if run.get(_KL):
        reason = "the rewards include a KL penalty, so the best of several rewards is not pass@k."
        yield run.problem(_KL, reason, f"Set {_KL}=false, {off}")
    if run.get(overlong) and run.get(manager) == "dapo":
        reason = "the length penalty can lower a correct answer's score below correct_at_least."
        yield run.problem(overlong, reason, f"Set {overlong}=false, {off}", alongside=[manager])
    if settings.all_k == (1,):
        key, reason = f"{section}.k", "verl's own estimator trains pass@1, so it is not replaced."
        yield run.problem(key, reason, f"Set {key} above 1, {off}", verdict="NO-OP", value=1)
    for name, mask in (run.get("correction.masks") or {}).items():
        if settings.objective == "loo_minus_one" and mask.get("when") == "negative":
            key, reason = f"{section}.objective", f"the mask {name} needs negative advantages, but there are none."
            yield run.problem(key, reason, "", {key: "loo"}, (name,), "NO-OP", value=settings.objective)


def _check_draws(key: str, run: Configured) -> Iterator[Problem]:
    shuffle, many = "data.shuffle", "data.dataloader_num_workers"
    for other, wrong, reason, proposed in (
        (
            many,
            bool(run.get(many)),
            "workers load batches too early, before their probabilities are known.",
            0,
        ),
        (own := "data.sampler.class_path", bool(run.get(own)), "your own sampler draws the prompts.", None),
        (shuffle, run.get(shuffle) is False, "prompts are read in the order of the data set.", True),
        (ROLLOUTS, count_rollouts(run) == 1, "a group of one never has both correct and wrong answers.", 8),
    ):
        if wrong:
            fix = f"Set {set_to(other, proposed)}, or {key}=none."
            yield run.problem(key, reason, fix, value="upsample", alongside={other: run.get(other, 1)})


def _check_group_sizes(section: str, settings: PassAtKSettings, run: Configured) -> Iterator[Problem]:
    key, budget, n = f"{section}.budget.mode", settings.budget, count_rollouts(run)
    v1, mode = run.get("trainer.use_v1"), "trainer.v1.trainer_mode"
    if not v1 or run.get(mode) != "sync":
        reason = "only verl's V1 trainer in the mode sync can sample groups of different sizes within one step."
        fix = f"Use verl 0.9.0 or later, or set {key}=none."
        if v1 is not None:
            fix = f"Set trainer.use_v1=true and {mode}=sync, or {key}=none."
        yield run.problem(key, reason, fix, value=budget.mode, alongside=[mode if v1 else "trainer.use_v1"])
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
