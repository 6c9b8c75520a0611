"""Which of verl's trainers and workers the configured run will go through: detected, never asked for.

| verl | trainer | worker |
|---|---|---|
| 0.7.1 | ``RayPPOTrainer`` (V0) | legacy actor, or engine with ``trainer.use_legacy_worker_impl=disable`` |
| 0.8.0 | V0 | engine |
| 0.9.0, 0.9.1 | V1, or V0 with ``trainer.use_v1=false`` | engine |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from verl_patches.contract import PatchError, installed_release

from .correction.proximal import WITHOUT_FORWARD

V1_MODES = ("sync", "colocate_async", "separate_async")
"""verl's V1 trainers that are covered."""
_SINCE_0_9_1 = "separate_async"
STRATEGIES = ("fsdp", "fsdp2", "megatron")
"""Engines that are covered, and those that a legacy actor can have."""
_SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
_MEGATRON = "actor_rollout_ref.actor.megatron"
_LEGACY = "trainer.use_legacy_worker_impl"
_USE_V1 = "trainer.use_v1"
STRATEGY = "actor_rollout_ref.actor.strategy"
"""The key that decides about the engine."""


@dataclass(frozen=True)
class LivePath:
    """The path from the rollout to the gradient.

    Attributes:
        release: of the installed verl.
        trainer: V0 is ``RayPPOTrainer`` over DataProto, V1 the trainers over TransferQueue.
        worker: what computes the loss.
        strategy: verl's ``actor.strategy``: fsdp, fsdp2, megatron, or one that is not covered.
    """

    release: str
    trainer: Literal["v0", "v1"]
    worker: Literal["engine", "legacy"]
    strategy: str

    def __str__(self) -> str:
        worker = f"{self.worker} {'actor' if self.worker == 'legacy' else 'worker'}"
        return f"verl {self.release}, {self.trainer.upper()} trainer, {worker} on {self.strategy}"


def live_path(config: DictConfig, release: str | None = None) -> LivePath:
    """The path of a composed configuration; ``release`` is that of the verl that an import finds by default.

    Raises:
        PatchError: no verl is found.
    """
    release = release or installed_release("verl")
    if release is None:
        raise PatchError("no verl is found. Fix: install one, or put a checkout of it on PYTHONPATH.")
    # Earlier and later releases read neither key, whatever it says.
    with_legacy, with_v1 = Version(release) < Version("0.8"), Version(release) >= Version("0.9")
    legacy = with_legacy and OmegaConf.select(config, _LEGACY, default="auto") != "disable"
    actor = config.actor_rollout_ref.actor
    strategy = actor.strategy
    if with_legacy and not legacy and strategy in ("fsdp", "fsdp2"):
        # Its engine takes the version of FSDP from its own section alone.
        strategy = OmegaConf.select(actor, "fsdp_config.strategy", default=strategy)
    return LivePath(
        release=release,
        trainer="v1" if with_v1 and OmegaConf.select(config, _USE_V1, default=False) else "v0",
        worker="legacy" if legacy else "engine",
        strategy=strategy,
    )


def uncovered(config: DictConfig, path: LivePath) -> Iterator[tuple[str, object, str, str]]:
    """What of the path the correction cannot go through, as (key, value, reason, fix)."""
    legacy = OmegaConf.select(config, _LEGACY, default=None)
    if legacy not in (None, "auto", "enable", "disable"):
        yield _LEGACY, legacy, "verl knows auto, enable and disable.", "Set one of them."
    elif legacy in ("auto", "enable") and Version(path.release) >= Version("0.8"):
        yield _LEGACY, legacy, f"verl {path.release} has no legacy actors and does not read it.", "Set it to disable."
    if OmegaConf.select(config, _USE_V1, default=False) and Version(path.release) < Version("0.9"):
        yield _USE_V1, True, f"verl {path.release} has no V1 trainer and does not read it.", "Set it to false."
    mode = config.trainer.v1.trainer_mode if path.trainer == "v1" else None
    covered = [each for each in V1_MODES if each != _SINCE_0_9_1 or Version(path.release) >= Version("0.9.1")]
    if path.trainer == "v1" and mode not in covered:
        reason = "not covered by the correction."
        if mode == _SINCE_0_9_1:
            reason = f"verl {path.release} runs it in another way than 0.9.1, with which the correction was tested."
        yield "trainer.v1.trainer_mode", mode, reason, f"Set one of {', '.join(covered)}."
    elif mode == "separate_async" and (key := _aliased_snapshot(config, path)):
        yield (
            key,
            True,
            "verl keeps the weights of pi_old, and of pi while pi_old is computed, by reference where they are "
            "offloaded: restoring them undoes updates.",
            f"Set it to false, or {_SYNC_STEP}=1.",
        )
    if path.strategy not in STRATEGIES:
        reason = "another engine than FSDP and Megatron is not covered by the correction."
        yield STRATEGY, path.strategy, reason, "Set fsdp2 or megatron, as model_engine=dp and model_engine=megatron do."
    key = "actor_rollout_ref.actor.use_prefix_grouper"
    if path.worker == "legacy" and OmegaConf.select(config, key, default=False):
        yield key, True, "the legacy actor's update cannot read what its forward pass returns.", "Set it to false."
    key = f"{_MEGATRON}.dynamic_context_parallel"
    if path.strategy == "megatron" and path.worker == "engine" and OmegaConf.select(config, key, default=False):
        yield key, True, "the correction is not tested with how it gathers metrics.", "Set it to false."
    key = f"{_MEGATRON}.override_transformer_config.overlap_moe_expert_parallel_comm"
    if path.strategy == "megatron" and path.worker == "legacy" and OmegaConf.select(config, key, default=False):
        yield key, True, "its schedule takes a micro-batch while the loss of another is computed.", "Set it to false."
    padded = not OmegaConf.select(config, "actor_rollout_ref.model.use_remove_padding")
    if path.release.startswith("0.7.") and path.worker == "engine" and padded:
        yield (
            "actor_rollout_ref.model.use_remove_padding",
            False,
            "verl 0.7.1's engine makes its attention mask of the loss mask and gets other log-probs than the model's.",
            f"Set it to true, or {_LEGACY}=enable.",
        )


def _aliased_snapshot(config: DictConfig, path: LivePath) -> str | None:
    """The key by which weights lie on the CPU when verl takes snapshots of them; there they are not copied."""
    if OmegaConf.select(config, "trainer.device") == "cpu":  # where verl_patches.cpu makes them copies
        return None
    if OmegaConf.select(config, _SYNC_STEP) == 1 or OmegaConf.select(config, "correction.proximal") in WITHOUT_FORWARD:
        return None
    if path.strategy != "fsdp2":
        return None
    keys = (f"actor_rollout_ref.actor.fsdp_config.{name}" for name in ("param_offload", "offload_policy"))
    return next((key for key in keys if OmegaConf.select(config, key)), None)
