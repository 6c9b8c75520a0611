"""Settings of length penalties (the section ``length_penalty``) and their start-up checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from ...batch.declared_keys import Configured, Key, Rule, count, number
from ...correction import Problem, SpecError
from ...correction.problem import set_to
from ..setting_checks import ROLLOUTS, SectionSettings, count_rollouts, read_train_column
from ..validation_answers import is_dump

Kind = Literal["none", "uniform", "group", "anchor", "reference"]
COEFFICIENT: Mapping[str, float] = {"none": 0.0, "uniform": 1e-4, "group": 0.1, "anchor": 0.01, "reference": 0.01}
"""Default coefficient of each kind, used if ``coefficient`` is null."""
COLUMN = "extra_info."
"""Prefix of ``reference`` if it names a column of the data set."""


def _is_reference(value: Any) -> bool:
    named = isinstance(value, str) and value.startswith(COLUMN) and value != COLUMN
    return named or number("tokens", above=0, null=True).fits(value)


@dataclass(frozen=True)
class AnchorSettings:
    """Settings of ``penalties.Anchors``; ``per`` selects one anchor per prompt or one per data source."""

    pass_rate: Annotated[float, number("a share in (0, 1)", above=0, below=1)]
    min_samples: Annotated[int, count("a number of answers, 1 or more")]
    window: Annotated[int, count("a number of answers, 1 or more")]
    per: Literal["prompt", "source"]


@dataclass(frozen=True)
class WarmupSettings:
    """Settings of the warm-up: the penalty is 0 up to ``from_step``, then grows linearly for ``steps`` steps."""

    from_step: Annotated[int, count("a step, 0 or more", 0)]
    steps: Annotated[int, count("a number of steps, 0 or more", 0)]


_FIXED = ("classes.from_step", ...)


@dataclass(frozen=True)
class ClassSettings:
    """Settings of the easy and hard prompts, which the first validation at or after ``from_step`` determines."""

    from_step: Annotated[int | None, count("a step, 0 or more, or null", 0, null=True)]
    samples: Annotated[int, count("a number of answers, 1 or more", read_with=_FIXED)]
    easy_above: Annotated[float, number("a share in [0, 1)", 0, below=1, read_with=_FIXED)]
    hard_below: Annotated[float, number("a share in (0, 1]", most=1, above=0, read_with=_FIXED)]


@dataclass(frozen=True)
class LeaveOutSettings:
    """Settings that leave out prompts with a pass rate under ``below`` in the file ``dump``; None keeps all prompts."""

    dump: Annotated[
        str | None, Key(lambda value: value is None or (isinstance(value, str) and value != ""), "a file, or null")
    ]
    below: Annotated[float, number("a share in (0, 1]", most=1, above=0, read_with=("leave_out.dump", ...))]


@dataclass(frozen=True)
class LengthSettings(SectionSettings):
    """Settings of the length penalty.

    Attributes:
        kind: see ``penalties.penalties``; with ``none``, lengths are only measured.
        coefficient: factor of the penalty.
        place: after verl's normalisation within the group, or before it, on the rewards.
        zero_variance: whether groups whose rewards are equal within float32 rounding are penalised or skipped.
        applies_to: all rows, or only the correct ones.
        correct_at_least: minimum score for a row to count as correct.
        reference: number of tokens, or a field ``extra_info.NAME`` of the data set; None for no reference.
        most: largest absolute penalty of a row; None: no limit.
        truncated: whether answers of the maximum length are kept, or dropped by setting their advantage to 0.
    """

    option, needed = "length_penalty/anchor", "kind"
    rules = (
        Rule(
            "classes.hard_below",
            lambda values: values["classes.hard_below"] > values["classes.easy_above"],
            "a prompt could be both easy and hard.",
            lambda values: min(0.1, values["classes.easy_above"]),
            "classes.easy_above",
        ),
    )
    kind: Kind
    coefficient: Annotated[float, number("a number, 0 or more, or null", 0, null=True)]
    place: Literal["after", "before"]
    zero_variance: Literal["penalise", "skip"]
    applies_to: Literal["all", "correct"]
    correct_at_least: Annotated[float, number("a score")]
    warmup: WarmupSettings
    anchor: AnchorSettings
    reference: Annotated[
        float | str | None,
        Key(_is_reference, f"a number of tokens above 0, {COLUMN}NAME, or null", ("kind", "reference")),
    ]
    most: Annotated[float | None, number("a reward above 0, or null", above=0, null=True)]
    truncated: Literal["keep", "drop"]
    classes: ClassSettings
    leave_out: LeaveOutSettings

    @classmethod
    def from_mapping(cls, section: str, values: Any) -> LengthSettings:
        """Build the settings from the values of the section; a null coefficient is replaced with the kind's default.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = cls.build(cls.read(section, values))
        if given.kind == "reference" and given.reference is None:
            key, kind = f"{section}.reference", f"{section}.kind"
            fix = f"Set {key} to a number of tokens, or to {COLUMN}NAME for a column of the data set."
            raise SpecError(
                "no length is given.", fix, key=key, alongside={kind: "reference"}, proposed={kind: "anchor"}
            )
        return given if given.coefficient is not None else replace(given, coefficient=COEFFICIENT[given.kind])

    def compute_warmup(self, step: int) -> float:
        """Compute the warm-up factor of the penalty at a step, in [0, 1]."""
        past = step - self.warmup.from_step
        return float(past > 0) if self.warmup.steps == 0 else min(1.0, max(0.0, past / self.warmup.steps))


def read_length(info: Any, reference: str) -> float | None:
    """Read the length named by ``reference`` from a row's extra_info; None if it is not a finite number above 0.

    Example:
        >>> [read_length({"budget": value}, "extra_info.budget") for value in ("300", float("inf"), "long", None)]
        [300.0, None, None, None]
    """
    try:
        length = float(info[reference.removeprefix(COLUMN)])
    except (KeyError, TypeError, ValueError):
        return None
    return length if 0 < length < math.inf else None


ESTIMATORS = {"before": ("grpo", "rloo"), "after": ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")}
"""Maps ``place`` to the estimators of verl that compare a row's reward only with the rewards of its group.

The vectorized estimators differ in how they treat groups of one and, in verl 0.7.1, groups whose rewards are nearly
equal.
"""
_OVERLONG = {
    "reward.reward_kwargs.overlong_buffer_cfg.enable": "reward.reward_manager.name",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "reward_model.reward_manager",
}
"""Keys of DAPO's soft overlong penalty, each with the key of the reward manager that reads it."""
DATA_CLASS, LEAVE_OUT = "data.custom_cls", "offpolicy_leave_out"
"""verl's key of the data set's class, and the key of ``data`` that ``left_out.EasierPrompts`` reads."""
_FILTER = "algorithm.filter_groups.enable"
_KL = "algorithm.use_kl_in_reward"
_STEPS = "trainer.total_training_steps"


def find_problems(section: str, settings: LengthSettings, run: Configured) -> Iterator[Problem]:
    """Find conflicts between the settings and the configuration."""
    if settings.truncated == "drop":
        yield from _check_dropped(f"{section}.truncated", run)
    if settings.leave_out.dump is not None:
        yield from _check_left_out(f"{section}.leave_out.dump", settings.leave_out.dump, run)
    if settings.classes.from_step is not None:
        yield from _check_classes(f"{section}.classes", settings.classes, settings.classes.from_step, run)
    if settings.kind == "none":
        return
    if settings.coefficient == 0:
        key = f"{section}.coefficient"
        yield run.problem(
            key,
            "a penalty with coefficient 0 has no effect.",
            sets={key: None},
            verdict="NO-OP",
            value=settings.coefficient,
        )
        return
    yield from _find_conflicts(section, settings, run)
    yield from _find_idle(section, settings, run)
    if isinstance(reference := settings.reference, str):
        yield from _check_column(section, reference, run)


def _find_conflicts(section: str, settings: LengthSettings, run: Configured) -> Iterator[Problem]:
    place = f"{section}.place"

    def wrong(key: str, reason: str, proposed: Any, **more: Any) -> Problem:
        return run.problem(key, reason, f"Set {set_to(key, proposed)}, or {section}=none.", **more)

    for key, manager in _OVERLONG.items():
        if run.get(key) and run.get(manager) == "dapo":
            yield wrong(key, "the score already contains verl's own length penalty.", False, alongside=[manager])
    if run.get(key := "algorithm.adv_estimator") not in ESTIMATORS[settings.place]:
        yield wrong(key, "its advantages depend on more than the group's rewards, so they cannot be checked.", "grpo")
    if settings.place == "before":
        if run.get(_FILTER):
            reason = "groups with only correct answers are dropped before they are penalised."
            yield wrong(_FILTER, reason, False, alongside={place: "before"})
        for key, off, reason in (
            (_KL, (None, False), "the KL is part of the rewards that are normalised with the penalty."),
            ("pass_at_k.objective", (None, "none"), "the best of several penalised rewards is not pass@k."),
        ):
            if run.get(key) not in off:
                yield wrong(place, reason, "after", value="before", alongside=[key])
    elif settings.zero_variance == "skip" and run.get(_FILTER):
        reason = "groups with equal rewards are dropped, so the length of easy prompts is not penalised."
        yield run.problem(f"{section}.zero_variance", reason, verdict="NOTE", value="skip", alongside=[_FILTER])
    if settings.kind == "group" and count_rollouts(run) == 1:
        reason = "a group of one answer has no other length to compare with."
        yield wrong(f"{section}.kind", reason, "uniform", value="group", alongside={ROLLOUTS: 1})
    longest = run.get(key := "data.max_response_length")
    loss = min(settings.coefficient * (longest or 0), settings.most or math.inf)
    if settings.kind == "uniform" and loss > 1:
        reason = f"a correct answer of {longest} tokens loses {loss:g}, more than its reward of 1."
        fix, name = f"Set {section}.most=1.0, or set a smaller coefficient.", f"{section}.coefficient"
        yield run.problem(name, reason, fix, verdict="NOTE", value=settings.coefficient, alongside=[key])


def _find_idle(section: str, settings: LengthSettings, run: Configured) -> Iterator[Problem]:
    """Find settings that would have no effect in this run."""
    warmup, anchor, steps = settings.warmup, settings.anchor, run.get(_STEPS)
    if steps and (end := warmup.from_step + warmup.steps) > steps:
        key, reason = f"{section}.warmup.steps", f"the warm-up would end at step {end}, after the run has ended."
        sets = {key: 0} | ({f"{section}.warmup.from_step": 0} if warmup.from_step >= steps else {})
        yield run.problem(key, reason, sets=sets, value=warmup.steps, alongside=[_STEPS])
    epochs, rollouts = run.get("trainer.total_epochs"), count_rollouts(run)
    per_prompt = settings.kind == "anchor" and anchor.per == "prompt"
    if per_prompt and epochs and rollouts * epochs < anchor.min_samples:
        key, by_source = f"{section}.anchor.min_samples", {f"{section}.anchor.per": "source"}
        reason = f"each prompt gets {rollouts} answers in each of {epochs} epochs, which is too few for an anchor."
        yield run.problem(key, reason, sets=by_source, verdict="NO-OP", value=anchor.min_samples)


def _check_column(section: str, reference: str, run: Configured) -> Iterator[Problem]:
    """Check that each row of the training data has a reference length, if the data files are available."""
    for file, infos in read_train_column(run, COLUMN.removesuffix(".")):
        row = next((row for row, info in enumerate(infos) if read_length(info, reference) is None), None)
        if row is not None:
            fix, reason = f"Fill {reference}, or set {section}=anchor.", f"row {row} of {file} has no length above 0."
            yield run.problem(f"{section}.reference", reason, fix, value=reference)


def _check_dropped(key: str, run: Configured) -> Iterator[Problem]:
    for other in ("process_reward", "opd"):
        if OmegaConf.is_config(run.get(other)):
            reason, fix = f"{other} sets the advantages of dropped answers again.", f"Set {key}=keep, or {other}=null."
            yield run.problem(key, reason, fix, value="drop", alongside={other: "on"})
    for other in ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.entropy_coeff"):
        if run.get(other):
            reason = "dropped answers have no advantage, but their tokens stay in this term of the loss."
            yield run.problem(key, reason, verdict="NOTE", value="drop", alongside=[other])


def _check_left_out(key: str, dump: str, run: Configured) -> Iterator[Problem]:
    path = run.get(custom := f"{DATA_CLASS}.path")
    if path and not str(path).endswith(".length_penalty.left_out"):
        reason = "leaving out prompts requires this package's own data set class."
        yield run.problem(custom, reason, f"Set {key}=null, or {custom}=null.")
    if not is_dump(Path(dump)):
        reason = "the file is not a validation dump of verl." if Path(dump).is_file() else "no such file."
        fix = "Give a dump from a validation of an early checkpoint on the training prompts."
        yield run.problem(key, reason, fix, value=dump)


def _check_classes(section: str, settings: ClassSettings, from_step: int, run: Configured) -> Iterator[Problem]:
    rollout, wanted = "actor_rollout_ref.rollout.val_kwargs", settings.samples
    n = int(run.get(key := f"{rollout}.n") or 1)
    if n < wanted:
        reason = f"no prompt has the {wanted} answers that {section}.samples needs."
        yield run.problem(key, reason, sets={key: wanted}, verdict="NO-OP", value=n)
    if not run.get(key := f"{rollout}.temperature"):
        reason = "all answers to a prompt are the same, so each prompt's pass rate is 0 or 1."
        yield run.problem(key, reason, sets={key: 1.0}, verdict="NO-OP")
    steps, key = run.get(_STEPS), f"{section}.from_step"
    if (steps and from_step > steps) or int(run.get("trainer.test_freq") or 0) <= 0:
        fix = f"Set trainer.test_freq above 0 and {key} to an earlier step, or set {key}=null."
        yield run.problem(
            key,
            "no validation will determine or track the easy and hard prompts.",
            fix,
            verdict="NO-OP",
            value=from_step,
        )
