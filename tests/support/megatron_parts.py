"""Code shared by the rank programs that run verl's real Megatron code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.megatron_program import Job, Layout, Rank, Seen
from tests.support.parity_case import ROWS, Case, add_plan
from tests.support.parity_paths import actor_settings

LOCAL_LAYERS = {
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "sequence_parallel": False,
}
"""Settings that Megatron's own layers need without CUDA."""

Update = Callable[[Job], Seen]


def in_every_layout(make: Callable[[Path, Layout], Update], model: str, out: str, plan: str) -> None:
    """Create the jobs of each layout and write OUT/rank<r>.pt; torch's variables contain the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    found = {}
    for name, (layout, jobs) in json.loads(Path(plan).read_text()).items():
        found[name] = _in_layout(make, Path(model), Layout(**layout), [Job(**job) for job in jobs])
    torch.save(found, Path(out) / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _in_layout(make: Callable[[Path, Layout], Update], model: Path, layout: Layout, jobs: list[Job]) -> Rank:
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    mpu.initialize_model_parallel(layout.tensor, layout.pipeline, layout.stages)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    update = make(model, layout)
    rank = Rank(
        mpu.get_data_parallel_rank(),
        mpu.get_tensor_model_parallel_rank(),
        mpu.is_pipeline_last_stage(ignore_virtual=True),
        {job.name: update(job) for job in jobs},
    )
    mpu.destroy_model_parallel()
    return rank


def share(case: Case, job: Job, layout: Layout) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return spec and plan of the job, and this rank's rows of the batch as the trainer sends it."""
    from megatron.core import parallel_state as mpu

    from recipe.offpolicy.batch.plan import BatchSplit
    from recipe.offpolicy.correction import CorrectionSpec

    columns = dict(case.with_teacher(job.distilled).columns)
    columns["response_mask"] = columns["response_mask"].clone()
    columns["response_mask"][job.silent] = 0
    spec = CorrectionSpec.from_mapping(job.correction or {})
    if spec.proximal != "recompute":
        columns["old_log_probs"] = columns["rollout_log_probs"]
    plan, columns = add_plan(columns, spec, BatchSplit(layout.data, ROWS // job.mini_batches, job.mode))
    count = ROWS // layout.data
    start = count * mpu.get_data_parallel_rank()
    return spec, plan, {name: column[start : start + count].clone() for name, column in columns.items()}


def loss_settings(job: Job) -> dict[str, Any]:
    """Fields of verl's ActorConfig that determine the loss."""
    return actor_settings(job.mode, "witness" if job.witnessed else "vanilla")


def whole_gradients(module: list[Any], bridge: Any) -> dict[str, Tensor]:
    """Return complete gradients by Hugging Face's names; the bridge gathers and names them like weights."""
    _gather_shards(module)
    parameters = [parameter for chunk in module for parameter in chunk.parameters()]
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    found = {name: tensor.detach().clone() for name, tensor in bridge.export_weights(module)}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return found


def _gather_shards(module: list[Any]) -> None:
    """Gather the shards of the distributed optimizer; each data-parallel rank has the summed gradients of its part."""
    from megatron.core import parallel_state as mpu

    group, rank = mpu.get_data_parallel_group(), mpu.get_data_parallel_rank()
    for bucket in (b for chunk in module for g in chunk.bucket_groups for b in g.buckets):
        shards = list(bucket.grad_data.chunk(mpu.get_data_parallel_world_size()))
        torch.distributed.all_gather(shards, shards[rank].clone(), group=group)
