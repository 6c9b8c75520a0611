"""Checks of ``offpolicy.staleness.eta``, which has to govern the run, and of what goes by the age of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import FULLY_ASYNC, ONE_STEP_OFF, USE_V1, describe_mode, find_program_mode, live_path

from ...correction import CorrectionSpec, MaskSpec, WeightSpec, recommended
from ...correction.problem import Problem, Verdict, format_value, set_to
from ...correction.proximal import BY_AGE
from ...staleness.staleness_settings import ETA, TARGET, StalenessSettings
from ..verl_keys.keys import list_active
from .config_reader import SHADOW, read_shadows

ASYNC_MODES = ("separate_async", "colocate_async")
MODE = "trainer.v1.trainer_mode"
SAMPLER = "trainer.v1.sampler"
REPLACED = {
    "num_warmup_batches": 1,
    f"{SAMPLER}.max_off_policy_threshold": 8,
    f"{SAMPLER}.max_off_policy_strategy": "drop",
}
"""Keys of verl that eta takes the place of, the first below the mode's section -> their values in verl's own
configuration, which mean that nobody has set them."""
_SKIP = "skip.rollout_tq.enable"
STALE_NATS = 0.2
"""Mean |log pi_old / mu| of a stale row, at least: 95 % of the tokens of stale rows are in such ones in the recorded
run ``tests/data/faults/held_out/colocate_async-14``."""


PARTIAL_ROLLOUT = "async_training.partial_rollout"
"""Of fully_async_policy: requests that a synchronisation of weights aborts go on with the new ones."""


def is_asynchronous(config: DictConfig) -> bool:
    """Return True if rollouts go on while the trainer updates."""
    v1 = bool(OmegaConf.select(config, USE_V1)) and OmegaConf.select(config, MODE) in ASYNC_MODES
    return v1 or find_program_mode(config) is not None


def notes_token_versions(config: DictConfig) -> bool:
    """Return True if the client of the rollout servers notes the version of the weights of each token."""
    notes = is_asynchronous(config) and find_program_mode(config) != ONE_STEP_OFF
    return notes and live_path(config).attributes.token_versions


def mixes_unknown_versions(config: DictConfig) -> bool:
    """Return True if several versions may sample a row and nothing notes which token by which."""
    program = find_program_mode(config)
    # Of V1's trainer requests are always resumed.
    resumes = program is None or bool(OmegaConf.select(config, PARTIAL_ROLLOUT, default=True))
    several = is_asynchronous(config) and program != ONE_STEP_OFF and resumes
    return several and not notes_token_versions(config)


_NOTES_AGES = "Use verl 0.9.1 with trainer.use_v1=true"


def is_bounded(config: DictConfig) -> bool:
    """Return True if eta is set."""
    return StalenessSettings.from_config(config) is not None


def check_staleness(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check what eta needs and what it replaces; nothing where it is null."""
    settings = StalenessSettings.from_config(config)
    if settings is None:
        return
    if (uncovered := _find_uncovered(config)) is not None:
        yield uncovered
        return
    if settings.adapt is not None and not spec.all_weights:
        reason = "it is the effective sample size of the weights, and the correction has none: it would always be met."
        fix = f"Add a weight, {recommended.WEIGHTED_LINE} for example, or set {TARGET}=null."
        yield _problem(TARGET, settings.adapt.ess, reason, fix, config)
    mode = config.trainer.v1.trainer_mode
    for name, usual in REPLACED.items():
        key = name if "." in name else f"trainer.v1.{mode}.{name}"
        value = OmegaConf.select(config, key)
        if value is not None and value != usual:
            reason = f"{ETA} takes its place, and it is not read."
            yield _problem(key, value, reason, f"Set {set_to(key, usual)}, or {ETA}=null.", config)
    key = f"{SAMPLER}.custom_sampler.name"
    path, name = (OmegaConf.select(config, f"{SAMPLER}.custom_sampler.{each}") for each in ("path", "name"))
    if path and name:
        reason = "the limit has a replay buffer of its own, and this one would not be built."
        yield _problem(key, name, reason, f"Set it to null, or {ETA}=null.", config)
    if OmegaConf.select(config, _SKIP, default=False):
        reason = "verl then replays recorded rollouts by whole batches, past the limit."
        yield _problem(_SKIP, True, reason, f"Set it to false, or {ETA}=null.", config)


def warn_verls_limit(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of keys of verl's own that do not bound the age of rows, or throw rows away, where eta leaves it to them.

    With W batches of warm-up, and no stragglers, verl trains groups W versions after their issue, and counts W + 1.
    """
    if not is_asynchronous(config) or is_bounded(config) or find_program_mode(config) is not None:
        return
    mode = config.trainer.v1.trainer_mode
    warmup = f"trainer.v1.{mode}.num_warmup_batches"
    ahead, threshold = OmegaConf.select(config, warmup), OmegaConf.select(config, f"{SAMPLER}.max_off_policy_threshold")
    strategy = OmegaConf.select(config, f"{SAMPLER}.max_off_policy_strategy")
    if not isinstance(ahead, int | float):
        return
    age = math.ceil(ahead)
    if threshold is None:
        key = f"{SAMPLER}.max_off_policy_threshold"
        reason = (
            f"no age is looked at: groups are trained {age} versions after their issue, and those that take longer as "
            f"late as they come."
        )
        yield _remark(key, None, reason, f"Set {ETA}={format_value(ahead)} to bound it.", "NOTE", {warmup: ahead})
        return
    if age + 1 <= threshold:
        return
    beside = {warmup: ahead, f"{SAMPLER}.max_off_policy_threshold": threshold}
    less = set_to(warmup, threshold - 1)
    fix = f"Set {less}, or {ETA}={threshold - 1} in the place of all three."
    key = f"{SAMPLER}.max_off_policy_strategy"
    if strategy == "wait":
        reason = (
            f"it waits for unfinished groups alone: finished groups are trained at age {age}, and the threshold admits "
            f"{threshold - 1}."
        )
        yield _remark(key, strategy, reason, fix, "NO-OP", beside, less)
    elif strategy == "drop":
        share = 1 - threshold / (age + 1)
        reason = f"by design it throws away {share:.0%} of all rollouts: groups come {age} versions after their issue."
        yield _remark(key, strategy, reason, fix, "NOTE", beside, less)


def warn_uncorrected(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of asynchronous training without a correction."""
    if is_asynchronous(config) and spec.is_none and not list_active(config):
        key, mode = describe_mode(config)
        reason = "rows are trained by newer weights than sampled them, and nothing corrects for it."
        fix = f"Add a correction, {recommended.LINE} for example: {recommended.WHY}."
        yield Problem(key, mode, reason, fix, "NOTE", ())


def warn_weight_alone(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of asynchronous training by a truncated weight per token, such as decoupled_ppo, without a mask."""
    weight = spec.weight
    if weight is None or (weight.kind, weight.level, weight.ratio) != ("truncate", "token", "rollout"):
        return
    if not is_asynchronous(config) or OmegaConf.select(config, ETA) == 0 or spec.masks:
        return
    reason = "a capped weight alone does not keep stale data from collapsing the run: decoupled_ppo did in 8 of 8 runs."
    fix = f"Take {recommended.LINE}: {recommended.WHY}."
    mode = dict([describe_mode(config)])
    yield Problem("correction.weight.upper", weight.upper, reason, fix, "NOTE", ("weight",), beside=mode)


def warn_narrow_bands(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of masks whose bounds suit two engines at equal weights, and reject rows that older weights sampled."""
    if not is_asynchronous(config) or OmegaConf.select(config, ETA) == 0:
        return
    for name, mask in spec.masks:
        low, high = mask.limits
        of_stale = mask.entry.at(-STALE_NATS)
        whole = mask.when == "any" and mask.ratio != "ppo" and mask.entry.reduce == "mean" and mask.level != "token"
        if not whole or mask.by_staleness is not None or low <= of_stale <= high:
            continue
        side = "lower" if of_stale < low else "upper"
        reason = (
            f"it rejects rows that older weights sampled: where [0.99, 1.01] kept 0.898 of the tokens of fresh rows in "
            f"a recorded asynchronous run, it kept 0.005 of those of stale ones, whose mean log-ratio is beyond "
            f"{STALE_NATS:g} nats a token."
        )
        fix = (
            f"Take {recommended.LINE} instead; or calibrate the bound on a recording of such rows, and watch "
            f"offpolicy/staleness/*/keep_token_share."
        )
        key, mode = f"correction.masks.{name}.{side}", dict([describe_mode(config)])
        yield Problem(key, getattr(mask, side), reason, fix, "NOTE", (f"masks.{name}",), beside=mode)


def _remark(
    key: str, value: Any, reason: str, fix: str, verdict: Verdict, beside: dict[str, Any], *overrides: str
) -> Problem:
    return Problem(key, value, reason, fix, verdict, (), overrides, beside=beside)


def check_ages(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that verl notes the versions that masks on age and ``by_staleness`` read, of shadows too."""
    mend: tuple[str, ...]
    for key, part in spec.age_parts.items():
        if (reason := _explain_unknown_age(config, part)) is None:
            continue
        whole = f"correction.{key}"
        value: Any
        name, value, mend, fix = "aggregate", part.aggregate, (), f"{_NOTES_AGES}, or remove {whole}."
        if part.by_staleness is not None:
            name, value, fix = "by_staleness", list(part.by_staleness), f"{_NOTES_AGES}, or set {whole}.{name}=null."
        elif live_path(config).attributes.weight_versions:
            name, value, mend, fix = "level", part.level, (set_to(f"{whole}.level", "sequence"),), ""
        yield Problem(f"{whole}.{name}", value, reason, fix, parts=(key,), overrides=mend)
    if spec.alpha == BY_AGE and (reason := _explain_unknown_age_of_tokens(config)) is not None:
        key = "correction.alpha"
        yield Problem(key, BY_AGE, reason, f"{_NOTES_AGES}, or set {key}=0.5 for every age.", parts=("proximal",))
    shadows = read_shadows(config)
    unknown = {
        name: reason
        for name, shadow in shadows.items()
        for reason in [_explain_unknown_age(config, part) for part in shadow.age_parts.values()]
        if reason is not None
    }
    for name, reason in unknown.items():
        fix = f"{_NOTES_AGES}, or take it out of {SHADOW}."
        yield Problem(SHADOW, name, f"it goes by age, and {reason}", fix, parts=(f"shadow.{name}",))


def _explain_unknown_age(config: DictConfig, part: WeightSpec | MaskSpec) -> str | None:
    release = live_path(config)
    if not release.attributes.weight_versions:
        return f"verl {release.release} does not note which version of the weights sampled a row: no age is known."
    return _explain_unknown_age_of_tokens(config) if part.level != "sequence" else None


def _explain_unknown_age_of_tokens(config: DictConfig) -> str | None:
    release = live_path(config)
    if not release.attributes.weight_versions:
        return f"verl {release.release} does not note which version of the weights sampled a row: no age is known."
    if mixes_unknown_versions(config):
        return (
            f"a row can be sampled by several versions, and which token by which was not shown with {release.release}."
        )
    return None


def warn_ages(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of masks on age that no token reaches, and of factors that change no bound."""
    eta = OmegaConf.select(config, ETA)
    settings = StalenessSettings.from_config(config) if is_asynchronous(config) else None
    oldest = settings.oldest_age if settings else None if is_asynchronous(config) else 0
    why = f"{ETA} lets none be older" if settings else "synchronous training samples by the weights in force"
    beside = {ETA: eta} if settings else {}
    if spec.alpha == BY_AGE and oldest is not None and oldest <= 1:
        reason = f"no token is more than one version older than the weights in force, since {why}: pi_old is mu."
        fix = "Set correction.alpha=0.5 for every age, or correction.proximal=bypass, which is the same here."
        yield Problem("correction.alpha", BY_AGE, reason, fix, "NO-OP", ("proximal",), beside=beside)
    for key, part in spec.age_parts.items():
        whole = f"correction.{key}"
        if part.by_staleness is not None:
            ages = len(part.by_staleness) if oldest is None else oldest + 1
            if all(factor == 1 for factor in part.by_staleness[:ages]):
                reason = "each age that occurs has the factor 1, which changes no bound."
                at = f"{whole}.by_staleness"
                fix = f"Set a factor above 1 for an age that occurs, or {at}=null."
                yield Problem(at, list(part.by_staleness), reason, fix, "NO-OP", (key,), beside=beside)
        elif oldest is not None and part.upper is not None and part.upper >= oldest:
            reason = f"no token is older than {oldest} versions, since {why}: the mask never acts."
            less = (
                f"Set {whole}.upper={oldest - 1}, which changes training, or remove"
                if oldest
                else "Train asynchronously, or remove"
            )
            yield Problem(f"{whole}.upper", part.upper, reason, f"{less} {whole}.", "NO-OP", (key,), beside=beside)


def _find_uncovered(config: DictConfig) -> Problem | None:
    """Find out why the trainer does not issue prompts by the limit."""
    path = live_path(config)
    eta = OmegaConf.select(config, ETA)
    off = set_to(ETA, None)
    if not path.attributes.staleness_limit:
        reason = f"verl {path.release} does not issue prompts as the limit needs it; 0.9.1 does."
        return Problem(ETA, eta, reason, f"Install verl 0.9.1, or set {off}.", parts=())
    if path.mode == FULLY_ASYNC:
        reason = "fully_async_policy issues prompts by its own limit, async_training.staleness_threshold."
        return Problem(ETA, eta, reason, f"Set {off}, and the limit there.", parts=())
    if path.asynchronous and path.trainer == "v0":
        return Problem(ETA, eta, f"{path.mode}_policy trains each batch one step late.", f"Set {off}.", parts=())
    if path.trainer != "v1":
        reason, beside = "the V0 trainer samples each batch by the weights in force.", {USE_V1: False}
    elif (mode := config.trainer.v1.trainer_mode) not in ASYNC_MODES:
        reason, beside = "it samples each batch by the weights in force.", {MODE: mode}
    else:
        return None
    fix = f"Set {off}, or {USE_V1}=true and {MODE} to one of {', '.join(ASYNC_MODES)}."
    return Problem(ETA, eta, reason, fix, parts=(), beside=beside)


def _problem(key: str, value: Any, reason: str, fix: str, config: DictConfig) -> Problem:
    return Problem(key, value, reason, fix, parts=(), beside={ETA: OmegaConf.select(config, ETA)})
