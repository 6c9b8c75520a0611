"""Check of batch sizes that verl cannot split evenly over ranks and micro-batches: it ends at its first update."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import LivePath, count_prompts, live_path

from ...correction import CorrectionSpec, Problem
from ...correction.problem import set_to
from ...correction.proximal import WITHOUT_FORWARD
from ..verl_keys.keys import BYPASS, read_rollout_correction
from .config_reader import ACTOR, ROLLOUT

_MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"


def check_micro_batches(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that the rows of a mini-batch on one rank are a multiple of a micro-batch of fixed size.

    verl asserts it where it splits a mini-batch (``prepare_micro_batches`` of the engines, ``dp_actor`` and its
    workers of 0.7.1), after models are loaded and the first batch is sampled.
    """
    path, ranks = live_path(config), count_data_parallel_ranks(config)
    if ranks is None or (path.worker == "legacy" and path.strategy == "megatron"):
        return  # the latter splits unevenly
    rows = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    if rows < ranks or (rows % ranks and path.worker == "engine"):
        yield _build_uneven(config, rows, ranks)
        return
    # The legacy FSDP worker asserts it for micro-batches of fixed size also where they are dynamic.
    if path.worker == "legacy" or not OmegaConf.select(config, f"{ACTOR}.use_dynamic_bsz"):
        key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        what = f"a mini-batch of {_MINI_BATCH} x {ROLLOUT}.n = {rows} rows"
        yield from _check_divides(config, key, rows // ranks, f"{what} leaves {rows // ranks} on each of {ranks} ranks")
    if path.worker == "engine":
        yield from _check_forward_passes(config, spec, path, rows, ranks)


def count_data_parallel_ranks(config: DictConfig) -> int | None:
    """Count the actor's data-parallel ranks; None if the machines cannot be divided so."""
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        each = math.prod(OmegaConf.select(actor, f"megatron.{size}", default=1) for size in sizes)
    else:
        own = OmegaConf.select(actor, "fsdp_config.ulysses_sequence_parallel_size", default=None)
        each = max(own or 1, OmegaConf.select(actor, "ulysses_sequence_parallel_size", default=1) or 1)
    ranks, rest = divmod(world, each)
    return ranks if ranks and not rest else None


def _build_uneven(config: DictConfig, rows: int, ranks: int) -> Problem:
    """Build the problem of a mini-batch whose rows are no multiple of the ranks."""
    size, each = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.actor_rollout_ref.rollout.n
    step = ranks // math.gcd(ranks, each)
    wanted = max(step, size // step * step)
    reason = f"{size} x {ROLLOUT}.n={each} rows cannot be split evenly over {ranks} data-parallel ranks."
    override = set_to(_MINI_BATCH, wanted)
    return Problem(_MINI_BATCH, size, reason, f"Set {override}, which changes training.", overrides=(override,))


def _check_forward_passes(
    config: DictConfig, spec: CorrectionSpec, path: LivePath, mini_batch: int, ranks: int
) -> Iterator[Problem]:
    """Check the same for the forward passes of pi_old and of the reference policy, over the whole batch."""
    rows = count_prompts(config) * config.actor_rollout_ref.rollout.n
    if path.trainer == "v1":
        # verl pads a batch up to whole mini-batches; separate_async makes a step of each mini-batch.
        several = config.trainer.v1.trainer_mode != "separate_async"
        rows = math.ceil(rows / mini_batch) * mini_batch if several else mini_batch
    if rows % ranks:
        return
    said = f"a batch of {rows} rows leaves {rows // ranks} on each of {ranks} ranks"
    passes = spec.proximal not in WITHOUT_FORWARD and not read_rollout_correction(config).get(BYPASS)
    if passes and not OmegaConf.select(config, f"{ROLLOUT}.log_prob_use_dynamic_bsz"):
        yield from _check_divides(config, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", rows // ranks, said)
    reference = "actor_rollout_ref.ref"
    kl = config.actor_rollout_ref.actor.use_kl_loss or OmegaConf.select(config, "algorithm.use_kl_in_reward")
    if kl and not OmegaConf.select(config, f"{reference}.log_prob_use_dynamic_bsz"):
        yield from _check_divides(config, f"{reference}.log_prob_micro_batch_size_per_gpu", rows // ranks, said)


def _check_divides(config: DictConfig, key: str, rows: int, said: str) -> Iterator[Problem]:
    size = OmegaConf.select(config, key)
    # Another kind of value is verl's to refuse.
    if isinstance(size, int) and size > 0 and rows % size:
        fits = max(each for each in range(1, min(size, rows) + 1) if rows % each == 0)
        reason = f"{said}, which is no multiple of it: verl would end at its first update."
        yield Problem(key, size, reason, overrides=(set_to(key, fits),))
