"""Rejects keys of verl's own correction that are combined with ours, misspelled, or ignored by the installed release.

verl keeps two copies of some settings. Which copy it reads depends on the release and the worker; the other is silently
ignored. According to the sources of 0.7.1, 0.8.0, 0.9.0 and 0.9.1:

* ``algorithm.rollout_correction`` with ``bypass_mode``: the trainer uses mu as pi_old. It leaves weights, rejections
  and ``loss_type`` to the worker, which does not receive them: the V0 trainer edits ``actor.policy_loss`` after the
  workers have copied it, and the V1 trainer does not edit it.
* ``actor.policy_loss.rollout_correction``: read only by the loss ``bypass_mode``.
* ``rollout.calculate_log_probs``, false by default up to 0.8.0: if it is false, the trainer skips its correction.
* ``actor.use_rollout_log_probs``: read only by the legacy FSDP actor in 0.7.1.
* ``actor.router_replay``: read only by the legacy Megatron actor in 0.7.1. Engines read the key of that name under
  ``actor.megatron`` and ``actor.veomni``. verl's FSDP engine does not replay routes; with our V1 trainer for 0.9.1, it
  does if the key under ``actor.fsdp_config`` is set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from verl_patches.execution_path import count_prompts

from ...batch.declared_keys import flatten
from ...correction import SpecError
from ...correction.dialects.verl import VERL_DEFAULTS as DEFAULTS
from ...correction.dialects.verl import read_verl_rejections, read_verl_weight_bounds
from ...correction.problem import Problem, find_closest, format_value, remove, set_to
from ...extensions.add_on import list_registered
from ..composed import ACTOR, BYPASS, LOSS_MODE, MODE, MU_KEY, VERL, Composed, name_part, to_mapping

WORKERS = f"{ACTOR}.policy_loss.rollout_correction"
FREE = re.compile(r"(?:^|_)(?:kwargs|override|env_vars|extra)(?:_|$)")
"""Names of verl's sections to which any key can be added, for other programs."""
OBSOLETE = {
    "rollout_is_threshold_lower": "rollout_is_threshold='lower_upper', a string, which verl >= 0.8 reads",
    "rollout_rs_threshold_lower": "rollout_rs_threshold='lower_upper', a string",
    "rollout_token_veto_threshold": "one of our masks, such as correction=outlier",
    "use_policy_gradient": "loss_type=reinforce",
}
"""Names used in verl 0.6 and 0.7.0 -> the equivalent names."""
UNREAD = {
    "loss_type": (BYPASS, "verl reads it only in bypass mode."),
    "rollout_is_threshold": ("rollout_is", "there is no weight to bound."),
    "rollout_is_batch_normalize": ("rollout_is", "there is no weight to normalise."),
    "rollout_rs_threshold": ("rollout_rs", "there is no rejection to bound."),
}
"""Keys of verl's correction -> the key that must be set for verl to read them, and why."""
_RS, _IS, _BYPASS = f"{VERL}.rollout_rs_threshold", f"{VERL}.rollout_is_threshold", f"{VERL}.{BYPASS}"
_CAP = "correction.weight.upper"
_LOSS, _SECTION = "policy_loss", VERL.rpartition(".")[2]
_DISTINCT = [key for key in (*DEFAULTS, *OBSOLETE) if key not in ("loss_type", "use_policy_gradient")]
"""Keys whose names show that they belong to verl's correction, wherever they occur."""
_READ = (f"{VERL}.", f"{ACTOR}.{_LOSS}.")
"""Sections that other checks cover."""


def check_not_both(run: Composed) -> Iterator[Problem]:
    """Reject a combination of verl's own correction with this package's correction."""
    if run.spec.is_none:
        return
    reason = "only verl's own correction reads this key, and that correction is off."
    if run.active:
        reason = "verl's own correction and ours would both correct the loss."
    weight = run.spec.weight
    for key, value in run.changed.items():
        known = key in DEFAULTS
        if known and value is None:
            continue  # null requests nothing
        name = f"{VERL}.{key}"
        overrides: tuple[str, ...] = ()
        back = set_to(name, DEFAULTS[key]) if known else f"~{name}"
        fix = f"Set {back} to train with ours only, or correction=none to train with verl's only."
        if weight is not None and weight.kind == "truncate" and weight.ratio == "rollout":
            plain = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            if key == "rollout_is" and value == weight.level:
                fix, overrides = f"correction.weight does this already: set {back}, or correction=none.", (back,)
            elif key == "rollout_is_threshold" and plain and weight.upper is not None:
                upper = set_to(_CAP, value)
                fix, overrides = f"Set {upper} instead, or correction=none.", (back, upper)
        yield run.problem(name, reason, fix, overrides, value=value)


def check_trainer_mode(run: Composed) -> Iterator[Problem]:
    """Check that ``trainer_mode`` is only used with the V1 trainer, because no other trainer reads it."""
    if run.path.trainer == "v0" and run.get(MODE) not in (None, "sync"):
        reason = f"this is {run.path}, which is synchronous and reads no mode."
        override = set_to("trainer.use_v1", True, add=True)
        yield run.problem(MODE, reason, "Set trainer.use_v1=true.", (override,), (MODE,), "NO-OP")


def check_former_names(run: Composed) -> Iterator[Problem]:
    """Check for former and unknown key names; each one counts as a separate correction."""
    reason = "verl no longer reads a key of this name."
    for key, value in run.verls.items() if run.spec.is_none else ():
        if key not in DEFAULTS and key != "_target_":
            name, instead, near = f"{VERL}.{key}", OBSOLETE.get(key), find_closest(key, DEFAULTS)
            fix, overrides = f"verl reads {', '.join(DEFAULTS)}.", remove(name, value)
            if instead:
                fix = f"Use {instead} instead."
            elif near:
                meant = set_to(f"{VERL}.{near}", value)
                fix, overrides = f"Did you mean {meant}?", (f"~{name}", meant)
            said = reason if instead else "verl does not read any key of this name."
            yield run.problem(name, said, fix, overrides, (name_part(key),), "NO-OP", value=value)


def check_decoupled(run: Composed) -> Iterator[Problem]:
    """Check that keys required by other keys are set, and that mu is computed."""
    own = {key: value for key, value in run.changed.items() if value is not None}  # null requests nothing
    if not run.spec.is_none or not own:
        return
    for key, (needed, because) in UNREAD.items():
        if key in own and needed not in own:
            fix = f"Set {VERL}.{needed}, or remove this key."
            yield run.problem(f"{VERL}.{key}", because, fix, (), (name_part(key),), "NO-OP")
    weight, threshold = (name_part("rollout_is"),), own.get("rollout_is_threshold")
    if "rollout_is" in own and run.changed.get("rollout_is_threshold", 2.0) is None:
        reason = f"without a threshold, verl omits the weight that rollout_is={own['rollout_is']} requests."
        yield run.problem(_IS, reason, "Set it to 2.0.", {_IS: 2.0}, weight, "NO-OP")
    if not run.path.attributes.bound_pairs and isinstance(threshold, str):
        reason = f"verl {run.path.release} takes one number, the cap; pairs of bounds are supported since 0.8."
        yield run.problem(
            _IS, reason, "Set one number, or use correction=icepop with lower and upper bounds.", (), weight
        )
    if not run.get(MU_KEY):
        reason = f"without the engine's log-probs, verl silently skips its correction, {', '.join(own)}."
        parts = tuple(name_part(asked) for asked in run.active or own)
        yield run.problem(MU_KEY, reason, "Set it to true.", {MU_KEY: True}, parts, "NO-OP")


def check_bypass(run: Composed) -> Iterator[Problem]:
    """Check the weights, rejections and loss type used with ``bypass_mode``, and the worker's loss and its keys."""
    loss, asked_of = run.get(LOSS_MODE), run.verls
    if run.spec.is_none and asked_of.get(BYPASS):
        yield from _check_keys_beside(run, loss, asked_of)
    if run.spec.is_none and loss == BYPASS and not asked_of.get(BYPASS):
        reason = f"{_BYPASS}=false recomputes pi_old, which this loss uses as mu, so the mismatch is not corrected."
        fix = f"Set {_BYPASS}=true, or correction=bypass with loss_mode=vanilla."
        yield run.problem(LOSS_MODE, reason, fix, {_BYPASS: True}, (LOSS_MODE,))
    if (node := run.get(WORKERS)) is not None and loss != BYPASS:
        reason = f"only the loss {BYPASS} reads it, but {LOSS_MODE} is {loss}."
        fix = f"Remove it, or set {LOSS_MODE}={BYPASS} and {_BYPASS}=true."
        yield run.problem(WORKERS, reason, fix, (), (WORKERS,), "NO-OP", value=to_mapping(node))


def _check_keys_beside(run: Composed, loss: object, asked_of: dict[str, Any]) -> Iterator[Problem]:
    if loss != BYPASS:
        why = "the V1 trainer sends it to no worker"
        if run.path.trainer == "v0":
            why = "the trainer writes it to actor.policy_loss after the workers have received their copy"
        reason = f"in bypass mode the worker applies it, and {why}, so the loss stays {loss}, with mu as pi_old."
        ours = "set correction=bypass with a weight or mask, or one of correction=verl/bypass_*, which are proved live"
        overrides = _build_worker_overrides(asked_of, {**DEFAULTS, **to_mapping(run.get(WORKERS))})
        for key, value in run.changed.items():
            if key in DEFAULTS and key != BYPASS:
                fix, parts = f"Remove it from {VERL} and {ours}.", (name_part(_find_owner(key)),)
                yield run.problem(f"{VERL}.{key}", reason, fix, overrides, parts, "NO-OP", value=value)
        return
    node = run.get(WORKERS)
    # The loss reads the given keys over the defaults of verl's dataclass, which differ from those of its YAML.
    typed = {"rollout_is": "sequence"} if node is None or "_target_" in node else {}
    held = {**DEFAULTS, **typed, **to_mapping(node)}
    for key in DEFAULTS:
        if key != BYPASS and (value := asked_of.get(key, DEFAULTS[key])) != held[key]:
            at, parts = f"{WORKERS}.{key}", (name_part(_find_owner(key)),)
            reason = f"in bypass mode the worker applies its own {at}, which is {format_value(held[key])}."
            fix = f"Set +{at}={format_value(value)}, or one of correction=verl/bypass_* without {VERL}."
            yield run.problem(f"{VERL}.{key}", reason, fix, (set_to(at, value, add=True),), parts, value=value)


def _find_owner(key: str) -> str:
    """Return the part to which a key belongs; bounds and normalisation belong to the weight or the rejection."""
    return next((name for name in ("rollout_is", "rollout_rs") if key.startswith(name)), key)


def _build_worker_overrides(asked: dict[str, Any], held: dict[str, Any]) -> tuple[str, ...]:
    """Build overrides that set the worker's copy to the same values, and the loss that reads it."""
    said = {key: asked.get(key, default) for key, default in DEFAULTS.items() if key != BYPASS}
    differing = {key: value for key, value in said.items() if value != held[key]} or {"loss_type": said["loss_type"]}
    copied = (set_to(f"{WORKERS}.{key}", value, add=True) for key, value in differing.items())
    return (set_to(LOSS_MODE, BYPASS), *copied)


def check_legacy_mu(run: Composed) -> Iterator[Problem]:
    """Check ``actor.use_rollout_log_probs``: only the legacy FSDP actor reads it, and that actor needs it to use mu."""
    key, path = f"{ACTOR}.use_rollout_log_probs", run.path
    reads = path.worker == "legacy" and path.strategy in ("fsdp", "fsdp2")
    if run.get(key) and not reads and not path.asynchronous:  # configurations of asynchronous programs set it
        reason = f"only the legacy FSDP actor of verl 0.7.1 reads it, but this is {path}."
        fix = f"Set {key}=false; to use mu as pi_old set correction=bypass."
        yield run.problem(key, reason, fix, (), (key,), "NO-OP", value=True)
    one_step = run.actor.ppo_mini_batch_size >= count_prompts(run.config) and run.actor.ppo_epochs == 1
    if reads and one_step and run.verls.get(BYPASS) and not run.get(key):
        reason = "with one gradient step per batch, the legacy actor uses the current policy as pi_old, and mu is lost."
        fix, override = f"Set +{key}=true, or correction=bypass without {VERL}.", set_to(key, True, add=True)
        yield run.problem(_BYPASS, reason, fix, (override,), (name_part(BYPASS),), "NO-OP", value=True)


def find_meant(names: Sequence[str]) -> str | None:
    """Find the key of verl's own correction or policy loss that a given key was meant to be; None if no key is similar.

    Args:
        names: segments of the misplaced or misspelled key.
    """
    key = ".".join(names)
    if key.startswith(_READ) or any(map(FREE.search, names)):
        return None
    for place, name in enumerate(names):
        if find_closest(name, [_SECTION], 0.75):
            return ".".join([VERL, *(find_closest(each, DEFAULTS) or each for each in names[place + 1 :])])
        if find_closest(name, [_LOSS], 0.85) and place + 1 < len(names):
            return ".".join([ACTOR, _LOSS, *names[place + 1 :]])
    if names[-1] == "loss_mode" and names[0] != "distillation":
        return LOSS_MODE
    near = difflib.get_close_matches(names[-1].lower(), _DISTINCT, 1, 0.89)  # rollout_n must not match
    return f"{VERL}.{near[0]}" if near else None


_VERLS_TOPS = {
    "actor_rollout_ref",
    "algorithm",
    "async_training",
    "critic",
    "data",
    "reward",
    "reward_model",
    "trainer",
}


def check_misplaced(run: Composed) -> Iterator[Problem]:
    """Find keys of verl's own correction or policy loss outside the sections that verl reads."""
    plain: Any = OmegaConf.to_container(run.config, resolve=False)
    skipped = {"hydra", *list_registered(run.config)}
    for key, value in flatten({name: each for name, each in plain.items() if name not in skipped}).items():
        names = key.split(".")
        meant, leaf = find_meant(names), names[-1]
        if meant is None or value is None or value == {**DEFAULTS, "loss_mode": "vanilla"}.get(leaf, ...):
            continue
        if run.own_main and names[0] not in _VERLS_TOPS and not find_closest(names[0], [_SECTION], 0.75):
            continue  # the program's own section
        loss = meant == LOSS_MODE
        known = loss or meant.rpartition(".")[2] in DEFAULTS
        moved = (f"~{key}", set_to(meant, value)) if known and (loss or run.spec.is_none) else ()
        reason = "this key is unused there, so it would have no effect."
        fix = f"Did you mean {meant}{f'={format_value(value)}' if known else ''}?"
        yield run.problem(key, reason, fix, moved, (key if loss else name_part(leaf),), value=value)


def check_thresholds(run: Composed) -> Iterator[Problem]:
    """Find thresholds of verl's own correction that verl misreads or rejects."""
    values = run.verls if run.spec.is_none else {}
    if values.get("rollout_is") and (cap := values.get("rollout_is_threshold")) is not None:
        yield from _find_malformed(_IS, "rollout_is", 2.0, lambda: read_verl_weight_bounds(cap, _IS))
    rejection, bound = values.get("rollout_rs"), values.get("rollout_rs_threshold")
    if rejection:
        read = partial(read_verl_rejections, rejection, bound, f"{VERL}.")
        names = dict.fromkeys(name.strip() for name in str(rejection).split(",") if name.strip())
        # A pair of ratios for k1, else an upper bound in nats.
        usual = ("0.5_2.0" if name.endswith("k1") else "0.01" if "mean" in name else "2.0" for name in names)
        yield from _find_malformed(_RS, "rollout_rs", ",".join(usual), read)


def _find_malformed(key: str, owner: str, proposed: str | float, read: Callable[[], object]) -> Iterator[Problem]:
    try:
        read()
    except SpecError as error:
        overrides = (set_to(key, proposed),) if error.problem.key == key else error.problem.overrides
        yield replace(error.problem, parts=(name_part(owner),), overrides=overrides)
