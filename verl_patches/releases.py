"""The supported releases of verl, and the attributes in which they differ. This module imports no other package.

To support another release, add it to `RELEASES`, add its file to requirements/, and run the tests. Each release is
defined by its differences from the next release.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

V1_MODES = ("sync", "colocate_async", "separate_async")
"""The supported modes of verl's V1 trainer."""


@dataclass(frozen=True)
class Release:
    """A release of verl; the defaults describe the newest release.

    Attributes:
        name: the release, as pip spells it.
        legacy_actors: whether the release has actors without ``set_loss_fn``, and a key that selects them.
        engine_attends_by_loss_mask: whether the engine uses the loss mask as attention mask if ``use_remove_padding``
            is off.
        bound_pairs: whether ``rollout_is_threshold`` also accepts a pair, "0.5_2.0".
        replaying_engines: strategies whose engines read ``router_replay``.
        platforms: whether verl has a platform registry, reads VERL_ENGINE_DEVICE, and loads the entry point that reads
            OFFPOLICY_PATCHES.
        unpads_alone: whether verl can remove padding without flash-attn.
        weight_versions: whether batches record the version of the weights that sampled a sequence.
        v1_modes: supported values of ``trainer.v1.trainer_mode``; empty without a V1 trainer.
        staleness_limit: whether the asynchronous V1 trainers issue prompts as ``offpolicy.staleness.eta`` requires.
        token_versions: whether rollout servers report weight versions in a form that can be recorded per token.
        scores_prompts: whether rollout servers return vLLM's log-probs of a prompt's tokens.
        fsdp_replay: whether the V1 trainer and the FSDP engine support routing replay.
        watched_replay: whether the routes that the Megatron engine replays with the V1 trainer can be read from the
            routers.
        truncated_support: whether rollout servers and the FSDP engine can replay the support of truncated sampling.
        scales_lr: whether the learning rate of the FSDP engine's optimizer can follow the effective sample size.
        aggregates_gspo_by_key: whether the loss gspo follows ``loss_agg_mode``; if not, it always aggregates by
            ``seq-mean-token-mean``.
        separate_programs: whether verl includes fully_async_policy and one_step_off_policy.
        large_tensors: whether a tensor that exceeds the bucket of the weight sync is sent through a separate CUDA
            handle.
        merged_lora: whether the FSDP engine sends merged weights. Earlier engines restore the base weights before the
            merged weights are read.
        sglang_adapters: trainer engines from which SGLang rollouts can load an adapter.
    """

    name: str
    legacy_actors: bool = False
    engine_attends_by_loss_mask: bool = False
    bound_pairs: bool = True
    replaying_engines: tuple[str, ...] = ("megatron", "veomni")
    platforms: bool = True
    unpads_alone: bool = True
    weight_versions: bool = True
    v1_modes: tuple[str, ...] = V1_MODES
    staleness_limit: bool = True
    token_versions: bool = True
    scores_prompts: bool = True
    fsdp_replay: bool = True
    watched_replay: bool = True
    truncated_support: bool = True
    scales_lr: bool = True
    aggregates_gspo_by_key: bool = True
    separate_programs: bool = True
    large_tensors: bool = True
    merged_lora: bool = True
    sglang_adapters: tuple[str, ...] = ("fsdp", "megatron")

    def find_policy_aggregation(self, loss_mode: str | None, loss_agg_mode: str) -> str:
        """Return the aggregation of the policy term for ``policy_loss.loss_mode`` and ``actor.loss_agg_mode``."""
        fixed = loss_mode == "sapo" or (loss_mode == "gspo" and not self.aggregates_gspo_by_key)
        return "seq-mean-token-mean" if fixed else loss_agg_mode


_V0_9_1 = Release("0.9.1")
# separate_async of 0.9.0 computes pi_old as in 0.9.1, but differs in warm-up, rollouts on the trainer's GPUs and
# request balancing, and ignores hybrid_engine=false. Its servers report versions, but recording them was not tested.
_V0_9_0 = replace(
    _V0_9_1,
    name="0.9.0",
    unpads_alone=False,
    v1_modes=("sync", "colocate_async"),
    staleness_limit=False,
    token_versions=False,
    fsdp_replay=False,
    watched_replay=False,
    truncated_support=False,
    scales_lr=False,
    aggregates_gspo_by_key=False,
    sglang_adapters=("fsdp",),
)
_V0_8_0 = replace(_V0_9_0, name="0.8.0", platforms=False, v1_modes=(), merged_lora=False)
_V0_7_1 = replace(
    _V0_8_0,
    name="0.7.1",
    legacy_actors=True,
    engine_attends_by_loss_mask=True,
    bound_pairs=False,
    replaying_engines=("megatron",),
    weight_versions=False,
    scores_prompts=False,
    separate_programs=False,
    large_tensors=False,
    sglang_adapters=(),
)
RELEASES = (_V0_7_1, _V0_8_0, _V0_9_0, _V0_9_1)
"""Oldest first."""
TESTED = tuple(release.name for release in RELEASES)
VLLM = ("0.24.0", "0.28.0", "0.31.0")
"""Releases of vLLM with a file in requirements/. For 0.24.0, which verl 0.9.1 requires, only contracts were checked."""
FLASH_ATTN = "2.8.3"
"""Release of flash-attn that verl 0.9.1 pins; no run has used it yet."""
_CALLED_OTHERWISE = {"0.8.0.dev": "0.8.0", "0.8.0.dev0": "0.8.0"}
"""Version strings of a checkout of verl's tag v0.8.0: in its version file, and as reported by pip."""


def release_of(version: str) -> str:
    """Return the release to which a version belongs: "0.8.0" for "0.8.0.dev" and "0.8.0+cpu"."""
    public = version.strip().partition("+")[0]
    return _CALLED_OTHERWISE.get(public, public)


def attributes_of(release: str) -> Release:
    """Return the entry of a release; for an untested release, the newest entry that is not later, or the oldest."""
    number = _number(release)
    return next((row for row in reversed(RELEASES) if _number(row.name) <= number), RELEASES[0])


def is_too_old(release: str) -> bool:
    """Return True for a release before the oldest supported one."""
    return _number(release) < _number(TESTED[0])


def specifiers(holds: Callable[[Release], bool]) -> tuple[str, ...]:
    """List the version specifiers, such as ("==0.9.1",), of the supported releases that have an attribute."""
    return tuple(f"=={release.name}" for release in RELEASES if holds(release))


def _number(release: str) -> tuple[int, ...]:
    """Parse "0.10.0.dev0" to (0, 10, 0)."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
