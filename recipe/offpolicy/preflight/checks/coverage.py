"""Check that the correction covers the path from the rollout to the gradient."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import LEGACY, STRATEGY, USE_V1, LivePath, describe_mode, live_path
from verl_patches.releases import TESTED

from ...correction import CorrectionSpec
from ...correction.problem import EVERYTHING, Problem, set_to
from ...correction.proximal import WITHOUT_FORWARD

STRATEGIES = ("fsdp", "fsdp2", "megatron")
"""Engines that are covered, and those that a legacy actor can have."""
_SEPARATE = "separate_async"
_MODE = "trainer.v1.trainer_mode"
_SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
_MEGATRON = "actor_rollout_ref.actor.megatron"
_REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"


def check_path(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that the configured path is covered."""
    yield from find_uncovered(config, live_path(config))


def find_uncovered(config: DictConfig, path: LivePath) -> Iterator[Problem]:
    """Find what is not covered of a known path."""
    yield from _check_switches(config, path)
    yield from _check_mode(config, path)
    yield from _check_engine(config, path)


def _problem(key: str, value: object, reason: str, fix: str, mend: object = False) -> Problem:
    return Problem(key, value, reason, fix, "ERROR", EVERYTHING, (set_to(key, mend),))


def _check_switches(config: DictConfig, path: LivePath) -> Iterator[Problem]:
    legacy = OmegaConf.select(config, LEGACY, default=None)
    if legacy not in (None, "auto", "enable", "disable"):
        yield _problem(LEGACY, legacy, "verl knows auto, enable and disable.", "Set one of them.", "auto")
    elif legacy in ("auto", "enable") and not path.attributes.legacy_actors:
        reason = f"verl {path.release} has no legacy actors and does not read it."
        yield _problem(LEGACY, legacy, reason, "Set it to disable.", "disable")
    if OmegaConf.select(config, USE_V1, default=False) and not path.attributes.v1_modes:
        yield _problem(USE_V1, True, f"verl {path.release} has no V1 trainer and does not read it.", "Set it to false.")


def _check_mode(config: DictConfig, path: LivePath) -> Iterator[Problem]:
    if path.trainer == "v0" and path.asynchronous and not path.attributes.separate_programs:
        reason = f"{path.mode}_policy of verl {path.release} is not covered by the correction; {TESTED[-1]}'s is."
        where, value = describe_mode(config)
        yield Problem(where, value, reason, f"Install verl {TESTED[-1]}.", "ERROR", EVERYTHING)
    mode = config.trainer.v1.trainer_mode if path.trainer == "v1" else None
    covered = path.attributes.v1_modes
    if path.trainer == "v1" and mode not in covered:
        reason, fix = "not covered by the correction.", f"Set one of {', '.join(covered)}."
        mend = _find_nearest_mode(mode, covered)
        if mode == _SEPARATE:
            newest = TESTED[-1]
            reason = (
                f"verl {path.release} computes pi_old in it as {newest} does, with which it was tested, but warms up, "
                "lends the trainer's GPUs to rollouts and deals requests in other ways, ignores hybrid_engine=false, "
                "and was not shown to note versions by token."
            )
            fix = f"Set {_MODE}={mend}, or install verl {newest}."
        yield _problem(_MODE, mode, reason, fix, mend)
    elif mode == _SEPARATE and (key := _find_aliased_snapshot(config, path)):
        reason = (
            "verl keeps the weights of pi_old, and of pi while pi_old is computed, by reference where they are "
            "offloaded: restoring them undoes updates."
        )
        yield _problem(key, True, reason, f"Set it to false, or {_SYNC_STEP}=1.")


def _find_nearest_mode(mode: object, covered: Sequence[str]) -> str:
    """Find the covered mode that is nearest to one that is not; sync only for a misspelt sync.

    What trains asynchronously under another name is not to become synchronous in silence.
    """
    given = str(mode).lower()
    if "sync" in covered and "a" not in given and difflib.get_close_matches(given, ["sync"], 1):
        return "sync"
    others = [each for each in covered if each != "sync"]
    # Modes of other programs, such as fully_async, separate sampling from training.
    return (difflib.get_close_matches(given, others, 1, 0.65) or others[-1:] or covered[:1])[0]


def _check_engine(config: DictConfig, path: LivePath) -> Iterator[Problem]:
    if path.strategy not in STRATEGIES:
        reason = "another engine than FSDP and Megatron is not covered by the correction."
        fix = f"No override corrects {path.strategy}: train with fsdp2 or megatron, or without a correction."
        yield Problem(STRATEGY, path.strategy, reason, fix, "ERROR", EVERYTHING)
    key = "actor_rollout_ref.actor.use_prefix_grouper"
    if path.worker == "legacy" and OmegaConf.select(config, key, default=False):
        reason = "the legacy actor's update cannot read what its forward pass returns."
        yield _problem(key, True, reason, "Set it to false.")
    key = f"{_MEGATRON}.dynamic_context_parallel"
    if path.strategy == "megatron" and path.worker == "engine" and OmegaConf.select(config, key, default=False):
        reason = "the correction is not tested with how it gathers metrics."
        yield _problem(key, True, reason, "Set it to false.")
    key = f"{_MEGATRON}.override_transformer_config.overlap_moe_expert_parallel_comm"
    if path.strategy == "megatron" and path.worker == "legacy" and OmegaConf.select(config, key, default=False):
        reason = "its schedule takes a micro-batch while the loss of another is computed."
        yield _problem(key, True, reason, "Set it to false.")
    padded = not OmegaConf.select(config, _REMOVE_PADDING)
    if path.attributes.engine_attends_by_loss_mask and path.worker == "engine" and padded:
        reason = (
            f"verl {path.release}'s engine masks attention by the loss mask, and gets other log-probs than the model's."
        )
        yield _problem(_REMOVE_PADDING, False, reason, f"Set it to true, or {LEGACY}=enable.", True)


def _find_aliased_snapshot(config: DictConfig, path: LivePath) -> str | None:
    """Find the key that keeps weights on the CPU, where verl's snapshots alias instead of copy them."""
    if OmegaConf.select(config, "trainer.device") == "cpu":  # where verl_patches.cpu makes them copies
        return None
    if OmegaConf.select(config, _SYNC_STEP) == 1 or OmegaConf.select(config, "correction.proximal") in WITHOUT_FORWARD:
        return None
    if path.strategy != "fsdp2":
        return None
    keys = (f"actor_rollout_ref.actor.fsdp_config.{name}" for name in ("param_offload", "offload_policy"))
    return next((key for key in keys if OmegaConf.select(config, key)), None)
