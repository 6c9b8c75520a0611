"""Settings of the length penalty, the section ``length_penalty``, and its start-up checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from ...batch.declared_keys import Key, choice, count, number
from ...correction import Problem, SpecError
from ...correction.problem import set_to
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


ESTIMATORS = {"before": ("grpo", "rloo"), "after": ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")}
"""verl's estimators, by place, that only compare a row's reward with its group's.

The vectorized ones treat groups of one, and in verl 0.7.1 groups of nearly equal rewards, differently.
"""
_OVERLONG = {
    "reward.reward_kwargs.overlong_buffer_cfg.enable": "reward.reward_manager.name",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "reward_model.reward_manager",
}
"""DAPO's soft punishment of long answers, with the key of the reward manager that reads it."""
_ROLLOUTS = "actor_rollout_ref.rollout.n"
DATA_CLASS, LEAVE_OUT = "data.custom_cls", "offpolicy_leave_out"
"""verl's key of the data set's class, and the key of ``data`` that ``left_out.EasierPrompts`` reads."""
_FILTER = "algorithm.filter_groups.enable"
_KL = "algorithm.use_kl_in_reward"


def find_problems(section: str, settings: LengthSettings, config: DictConfig) -> Iterator[Problem]:
    """Find conflicts of the settings with the configuration."""
    yield from _check_options(section, settings, config)
    if settings.kind == "none":
        return
    if settings.coefficient == 0:
        key = f"{section}.coefficient"
        reason, proposed = "a penalty of 0 does nothing.", (set_to(key, None),)
        yield Problem(key, settings.coefficient, reason, verdict="NO-OP", parts=(section,), overrides=proposed)
        return
    yield from _find_conflicts(section, settings, config)
    yield from _find_idle(section, settings, config)
    yield from _check_column(section, settings, config)


def _find_conflicts(section: str, settings: LengthSettings, config: DictConfig) -> Iterator[Problem]:
    parts, place = (section,), f"{section}.place"

    def wrong(key: str, value: Any, reason: str, override: str, alongside: dict[str, Any] | None = None) -> Problem:
        return Problem(
            key, value, reason, f"Set {override}, or {section}=none.", parts=parts, alongside=alongside or {}
        )

    for key, manager in _OVERLONG.items():
        if OmegaConf.select(config, key) and OmegaConf.select(config, manager) == "dapo":
            reason = "the same score contains verl's own length penalty, so right answers fall below 1."
            yield wrong(key, True, reason, set_to(key, False), {manager: "dapo"})
    estimator = OmegaConf.select(config, "algorithm.adv_estimator")
    if estimator not in ESTIMATORS[settings.place]:
        reason = "its advantages are not computed from the group's rewards alone, so the penalty cannot be checked."
        yield wrong("algorithm.adv_estimator", estimator, reason, set_to("algorithm.adv_estimator", "grpo"))
    objective = OmegaConf.select(config, "pass_at_k.objective")
    if settings.place == "before":
        if OmegaConf.select(config, _FILTER):
            reason = "groups with only right answers are dropped before the penalty, which is meant for easy prompts."
            yield wrong(_FILTER, True, reason, set_to(_FILTER, False), {place: "before"})
        if OmegaConf.select(config, _KL):
            reason = "the KL is part of the rewards that are normalised with the penalty."
            yield wrong(place, "before", reason, set_to(place, "after"), {_KL: True})
        if objective not in (None, "none"):
            reason = "the best of several penalised rewards is not pass@k."
            yield wrong(place, "before", reason, set_to(place, "after"), {"pass_at_k.objective": objective})
    elif settings.zero_variance == "skip" and OmegaConf.select(config, _FILTER):
        key = f"{section}.zero_variance"
        reason = "groups with equal rewards are dropped, so the length of easy prompts is not penalised."
        yield Problem(key, "skip", reason, "", "NOTE", parts, alongside={_FILTER: True})
    rollouts = int(OmegaConf.select(config, _ROLLOUTS) or 1)
    if settings.kind == "group" and rollouts == 1:
        key = f"{section}.kind"
        yield wrong(key, "group", "a group of one has no other length.", set_to(key, "uniform"), {_ROLLOUTS: 1})
    longest = OmegaConf.select(config, "data.max_response_length")
    loss = min(settings.coefficient * (longest or 0), settings.most or math.inf)
    if settings.kind == "uniform" and loss > 1:
        key = f"{section}.coefficient"
        reason = (
            f"a right answer of {longest} tokens loses {loss:g} and scores below an empty one; lengths may collapse."
        )
        fix = f"To avoid it set {section}.most=1.0, or a smaller coefficient."
        alongside = {"data.max_response_length": longest}
        yield Problem(key, settings.coefficient, reason, fix, "NOTE", parts, alongside=alongside)


def _find_idle(section: str, settings: LengthSettings, config: DictConfig) -> Iterator[Problem]:
    """Find settings that would never act in this run."""
    parts = (section,)
    steps = OmegaConf.select(config, "trainer.total_training_steps")
    warmup = settings.warmup
    if steps and warmup.from_step + warmup.steps > steps:
        key = f"{section}.warmup.steps"
        reason = f"the warm-up ends at step {warmup.from_step + warmup.steps}, after the run."
        proposed = (set_to(key, 0), *((set_to(f"{section}.warmup.from_step", 0),) if warmup.from_step >= steps else ()))
        alongside = {"trainer.total_training_steps": steps}
        yield Problem(key, warmup.steps, reason, parts=parts, overrides=proposed, alongside=alongside)
    if settings.kind != "anchor" or settings.anchor.per == "source":
        return
    epochs = OmegaConf.select(config, "trainer.total_epochs")
    rollouts = int(OmegaConf.select(config, _ROLLOUTS) or 1)
    if epochs and rollouts * epochs < settings.anchor.min_samples:
        key = f"{section}.anchor.min_samples"
        reason = f"a prompt is answered {rollouts} times in each of {epochs} epochs, so none ever gets an anchor."
        proposed = (set_to(f"{section}.anchor.per", "source"),)
        yield Problem(key, settings.anchor.min_samples, reason, verdict="NO-OP", parts=parts, overrides=proposed)


def _check_column(section: str, settings: LengthSettings, config: DictConfig) -> Iterator[Problem]:
    """Check that each row of the training data has a reference length, if its files are available."""
    if not isinstance(settings.reference, str):
        return
    import pandas

    name = settings.reference.removeprefix(COLUMN)
    files = OmegaConf.select(config, "data.train_files")
    for file in [files] if isinstance(files, str) else list(files or []):
        if not str(file).endswith(".parquet") or not Path(str(file)).is_file():
            continue
        frame = pandas.read_parquet(str(file))
        infos = frame["extra_info"] if "extra_info" in frame else [None] * len(frame)
        for row, info in enumerate(infos):
            value = (info or {}).get(name)
            if value is None or not float(value) > 0:
                key = f"{section}.reference"
                fix = f"Fill {settings.reference}, or set {section}=anchor."
                reason = f"row {row} of {file} has no length above 0 there."
                yield Problem(key, settings.reference, reason, fix, parts=(section,))
                break


def _check_options(section: str, settings: LengthSettings, config: DictConfig) -> Iterator[Problem]:
    """Check dropped answers, classes and left out prompts, which any kind may have."""
    parts, read = (section,), partial(OmegaConf.select, config)
    if settings.truncated == "drop":
        key = f"{section}.truncated"
        for other in ("process_reward", "opd"):
            if OmegaConf.is_config(read(other)):
                reason = f"{other} sets advantages afterwards, so dropped answers would be trained on."
                fix = f"Set {key}=keep, or {other}=null."
                yield Problem(key, "drop", reason, fix, parts=parts, alongside={other: "on"})
        for other in ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.entropy_coeff"):
            if read(other):
                reason = "dropped answers have no advantage, but this term still contains their tokens."
                yield Problem(key, "drop", reason, "", "NOTE", parts, alongside={other: read(other)})
    dump = settings.leave_out.dump
    if dump is not None:
        key = f"{section}.leave_out.dump"
        path = read(f"{DATA_CLASS}.path")
        if path and not str(path).endswith(".length_penalty.left_out"):
            fix = f"Set {key}=null, or {DATA_CLASS}.path=null."
            yield Problem(f"{DATA_CLASS}.path", path, "leaving out prompts needs a class of its own.", fix, parts=parts)
        if not Path(dump).is_file():
            reason, fix = "no such file.", "Name a validation dump of an early checkpoint over the training prompts."
            yield Problem(key, dump, reason, fix, parts=parts)
    if settings.classes.from_step is None:
        return
    rollout, start = "actor_rollout_ref.rollout.val_kwargs", f"{section}.classes.from_step"
    n, wanted = int(read(f"{rollout}.n") or 1), settings.classes.samples
    if n < wanted:
        key, reason = f"{rollout}.n", f"no prompt has the {wanted} answers that {section}.classes.samples needs."
        yield Problem(key, n, reason, verdict="NO-OP", parts=parts, overrides=(set_to(key, wanted),))
    if not read(f"{rollout}.temperature"):
        key, reason = f"{rollout}.temperature", "all answers to a prompt are the same, so each is all right or wrong."
        yield Problem(key, read(key), reason, verdict="NO-OP", parts=parts, overrides=(set_to(key, 1.0),))
    steps = read("trainer.total_training_steps")
    if (steps and settings.classes.from_step > steps) or int(read("trainer.test_freq") or 0) <= 0:
        reason = "no validation follows from which classes could be fixed and followed."
        fix = f"Set trainer.test_freq above 0, a smaller {start}, or {start}=null."
        yield Problem(start, settings.classes.from_step, reason, fix, "NO-OP", parts)
