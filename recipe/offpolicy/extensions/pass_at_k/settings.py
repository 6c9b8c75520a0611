"""Settings of pass@k, the section ``pass_at_k``, and its start-up checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from ...batch.declared_keys import Key, Rule, choice, count, flag, number
from ...correction import Problem, SpecError
from ...correction.problem import set_to
from ..setting_checks import read_values
from .estimators import OBJECTIVES, find_impossible

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


_ROLLOUTS = "actor_rollout_ref.rollout.n"
_ESTIMATOR = "algorithm.adv_estimator"
_KL = "algorithm.use_kl_in_reward"
_FILTER = "algorithm.filter_groups.enable"
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def find_problems(section: str, settings: PassAtKSettings, config: DictConfig) -> Iterator[Problem]:
    """Find conflicts of the settings with the configuration."""
    if settings.objective != "none":
        yield from _check_objective(section, settings, config)
    if settings.budget.mode != "none":
        yield from _check_groups_are_seen(section, settings, config)
    if settings.budget.mode == "group_size":
        yield from _check_group_sizes(section, settings, config)
    if settings.budget.mode == "upsample":
        yield from _check_draws(section, settings, config)
    yield from _check_validation(section, settings, config)


def _check_objective(section: str, settings: PassAtKSettings, config: DictConfig) -> Iterator[Problem]:
    parts, objective = (section,), settings.objective

    def wrong(key: str, value: Any, reason: str, override: str, alongside: dict[str, Any] | None = None) -> Problem:
        lost = key in (_ESTIMATOR, _KL) or key.endswith("overlong_buffer_cfg.enable")  # asked for next to it
        fix, overrides = (f"Set {override}, or {section}=null.", ()) if lost else ("", (override,))
        return Problem(key, value, reason, fix, parts=parts, overrides=overrides, alongside=alongside or {})

    n = int(OmegaConf.select(config, _ROLLOUTS) or 1)
    for k in sorted(set(settings.all_k)):
        if k == 1:
            continue
        reason = find_impossible(n, k, objective)
        if reason is None and k == n and objective in ("analytic", "groups"):
            reason = f"k={k} of a group of {n}: {objective} gives only zeros."
        if reason is None:
            continue
        fit = next((each for each in range(n - 1, 1, -1) if find_impossible(n, each, objective) is None), None)
        key = f"{section}.schedule" if k != settings.k else f"{section}.k"
        if fit is None:
            proposed = set_to(_ROLLOUTS, 2 * max(settings.all_k))
        elif key.endswith("schedule"):
            proposed = set_to(key, [[step, min(each, fit)] for step, each in settings.schedule or ()])
        else:
            proposed = set_to(key, fit)
        value: Any = k if key.endswith(".k") else [list(pair) for pair in settings.schedule or ()]
        yield wrong(key, value, reason, proposed, {_ROLLOUTS: n})
        break
    estimator = OmegaConf.select(config, _ESTIMATOR)
    if estimator != "grpo":
        why = "is another pass@k" if estimator == "grpo_passk" else "would not run, nor anything that needs it"
        reason = f"{section} replaces verl's estimator, and {estimator} {why}."
        yield wrong(_ESTIMATOR, estimator, reason, set_to(_ESTIMATOR, "grpo"))
    if OmegaConf.select(config, _KL):
        reason = "the best of several rewards with a KL in them is not pass@k."
        yield wrong(_KL, True, reason, set_to(_KL, False))
    overlong, manager = "reward.reward_kwargs.overlong_buffer_cfg.enable", "reward.reward_manager.name"
    if OmegaConf.select(config, overlong) and OmegaConf.select(config, manager) == "dapo":
        reason = "long right answers fall below the smallest score of a right row."
        yield wrong(overlong, True, reason, set_to(overlong, False), {manager: "dapo"})
    if settings.all_k == (1,):
        key = f"{section}.k"
        reason = "pass@1 is what verl's own estimator trains, which is not replaced then."
        yield Problem(key, 1, reason, f"Set {key} above 1, or {section}=null.", "NO-OP", parts)
    negative = [
        name
        for name, mask in (OmegaConf.select(config, "correction.masks") or {}).items()
        if objective == "loo_minus_one" and mask.get("when") == "negative"
    ]
    for name in negative:
        key = f"{section}.objective"
        reason = f"no advantage is below 0, but the mask {name} only acts on negative ones."
        override = set_to(key, "loo")
        yield Problem(key, objective, reason, verdict="NO-OP", parts=(name,), overrides=(override,))


def _check_groups_are_seen(section: str, settings: PassAtKSettings, config: DictConfig) -> Iterator[Problem]:
    if OmegaConf.select(config, _FILTER):
        key = f"{section}.budget.mode"
        reason = "groups that are all right or all wrong are dropped, so a budget never learns of them."
        fix = f"Set {_FILTER}=false, or {key}=none."
        yield Problem(key, settings.budget.mode, reason, fix, parts=(section,), alongside={_FILTER: True})


def _check_draws(section: str, settings: PassAtKSettings, config: DictConfig) -> Iterator[Problem]:
    parts, key, mode = (section,), f"{section}.budget.mode", settings.budget.mode
    workers, sampler = "data.dataloader_num_workers", "data.sampler.class_path"

    def wrong(other: str, value: Any, reason: str, proposed: Any) -> Problem:
        return Problem(
            key, mode, reason, f"Set {set_to(other, proposed)}, or {key}=none.", parts=parts, alongside={other: value}
        )

    if count := OmegaConf.select(config, workers):
        yield wrong(workers, count, "workers load batches ahead, before the answers that probabilities depend on.", 0)
    if path := OmegaConf.select(config, sampler):
        yield wrong(sampler, path, "a sampler of your own draws the prompts.", None)
    if OmegaConf.select(config, "data.shuffle") is False:
        yield wrong("data.shuffle", False, "prompts are read in their order.", True)
    if int(OmegaConf.select(config, _ROLLOUTS) or 1) == 1:
        yield wrong(_ROLLOUTS, 1, "a group of one never has both right and wrong answers.", 8)


def _check_group_sizes(section: str, settings: PassAtKSettings, config: DictConfig) -> Iterator[Problem]:
    parts, key, budget = (section,), f"{section}.budget.mode", settings.budget
    use_v1, mode = OmegaConf.select(config, "trainer.use_v1"), OmegaConf.select(config, "trainer.v1.trainer_mode")
    if not use_v1 or mode != "sync":
        reason = "only verl's V1 trainer in the mode sync samples groups of different sizes, all of one step."
        alongside = {"trainer.use_v1": use_v1} if not use_v1 else {"trainer.v1.trainer_mode": mode}
        fix = f"Set trainer.use_v1=true and trainer.v1.trainer_mode=sync, or {key}=none."
        yield Problem(key, budget.mode, reason, fix, parts=parts, alongside=alongside)
    if OmegaConf.select(config, _ESTIMATOR) == "remax":
        reason = "ReMax needs one greedy answer per prompt."
        fix = f"Set {_ESTIMATOR}=grpo, or {key}=none."
        yield Problem(key, budget.mode, reason, fix, parts=parts, alongside={_ESTIMATOR: "remax"})
    n = int(OmegaConf.select(config, _ROLLOUTS) or 1)
    if not budget.least <= n <= budget.most:
        name = "least" if n < budget.least else "most"
        edge = f"{section}.budget.{name}"
        reason = f"a step has {n} rollouts per prompt on average."
        proposed = (set_to(edge, n),)
        yield Problem(edge, getattr(budget, name), reason, parts=parts, overrides=proposed, alongside={_ROLLOUTS: n})
    if settings.objective != "none" and find_impossible(budget.least, max(settings.all_k), settings.objective):
        edge, k = f"{section}.budget.least", max(settings.all_k)
        reason = f"a group of {budget.least} has no advantage for k={k}."
        yield Problem(edge, budget.least, reason, verdict="NOTE", parts=parts)


def _check_validation(section: str, settings: PassAtKSettings, config: DictConfig) -> Iterator[Problem]:
    if settings.objective != "none" and settings.dynamic.successes is None:
        return
    parts = (section,)
    n = int(OmegaConf.select(config, f"{_VALIDATION}.n") or 1)
    temperature = OmegaConf.select(config, f"{_VALIDATION}.temperature")
    most = max(settings.metric.k, default=1)
    dynamic = settings.dynamic
    rounds = 1 if dynamic.successes is None else max(min(dynamic.max_samples // n, dynamic.max_rounds), 1)
    wanted = max(most, 2)
    if not temperature:
        key = f"{_VALIDATION}.temperature"
        reason = "all samples of a prompt are the same answer: pass@k is pass@1."
        proposed = (set_to(key, 1.0), *((set_to(f"{_VALIDATION}.n", wanted),) if n * rounds < wanted else ()))
        yield Problem(key, temperature, reason, verdict="NO-OP", parts=parts, overrides=proposed)
    elif n * rounds < most and not settings.metric.extrapolate:
        key = f"{_VALIDATION}.n"
        reason = f"no prompt has the {most} samples that {section}.metric.k needs."
        yield Problem(key, n, reason, verdict="NO-OP", parts=parts, overrides=(set_to(key, most),))
