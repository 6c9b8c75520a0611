"""Two ranks of verl 0.7.1's real legacy FSDP actor on gloo: ``legacy_ranks.py OUT`` writes ``ranks.pt`` to OUT.

FSDP1 and FSDP2 give each rank half of the rows; with Ulysses, both ranks have all rows and half of each sequence.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

STEPS: dict[str, dict[str, Any]] = {
    "one": dict(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2),
    "two": dict(ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=1),
    "dynamic": dict(ppo_mini_batch_size=2, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=13),
}
"""Rows per rank in a mini-batch: one or two steps for the eight rows of ``legacy_actor.rollout``."""
UNEQUAL = (7, 7, 7, 7, 1, 1, 2, 1)
"""Lengths of responses in "dynamic": with their prompts, rank 0 has 19 and 18 tokens per mini-batch, rank 1 has 5 and
8.
"""
TERMS: dict[str, Any] = dict(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="low_var_kl")


def main(rank: int, out: str, port: int) -> None:
    import verl.workers.actor.dp_actor  # noqa: F401
    import verl_patches
    from recipe.offpolicy.recording import recorder
    from tests.support import legacy_actor as la
    from tests.support.specs import BATCH_WIDE, STACK

    verl_patches.install("legacy")
    # Time that stands still: no row is left out on a busy machine.
    recorder.Recorder = partial(recorder.Recorder, clock=lambda: 0.0)  # type: ignore[assignment,misc]
    # Ranks that run into different collectives wait for one another: an error, well before the caller's limit.
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=600)
    )
    results: dict[str, Any] = {}
    for sharding in (fsdp1, fsdp2):
        for name, mapping in {"stack": STACK, "batch_wide": BATCH_WIDE}.items():
            for steps, config in STEPS.items():
                # PyTorch takes FSDP1's norm of gradients in float32 alone.
                dtype = torch.float32 if sharding is fsdp1 else torch.float64
                module = sharding(la.model(dtype))
                batch = rollout(steps, dtype)
                record = f"{out}/{sharding.__name__}" if (name, steps) == ("stack", "two") else None
                mini_rows = 2 * config["ppo_mini_batch_size"]
                data = la.handed(batch, mapping, mini_rows=mini_rows, ranks=2, record=record)
                results[f"{sharding.__name__} {name} {steps}"] = update(module, data.chunk(2)[rank], config)
        results[f"{sharding.__name__} log_probs"] = log_probs(
            sharding(la.model(dtype)), rollout("dynamic", dtype), rank
        )
    results["ulysses"] = ulysses(rank, f"{out}/ulysses")
    recorder.flush_all()
    if rank == 0:
        torch.save(results, Path(out) / "ranks.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def rollout(steps: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The eight rows of both ranks for one entry of ``STEPS``."""
    from tests.support import legacy_actor as la

    return la.rollout(dtype, UNEQUAL if steps == "dynamic" else la.LENGTHS)


def log_probs(module: Any, batch: dict[str, torch.Tensor], rank: int) -> list[tuple[torch.Tensor, int]]:
    """By rank, the log-probs of the responses, (4, T), as for pi_old, and their micro-batches of at most 13 tokens."""
    from tests.support import legacy_actor as la

    data = la.proto(batch).chunk(2)[rank]
    data.meta_info |= {"micro_batch_size": 4, "use_dynamic_bsz": True, "max_token_len": 13}
    passes: list[None] = []
    module.register_forward_hook(lambda *_: passes.append(None))
    values = la.actor(module).compute_log_prob(data)["log_probs"]
    halves: list[Any] = [None, None]
    torch.distributed.all_gather_object(halves, (values, len(passes)))
    return halves


def update(module: Any, data: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the complete parameters after the update, and the packets of both ranks."""
    from recipe.offpolicy.worker.metrics import take_packets
    from tests.support import legacy_actor as la

    actor = la.actor(module, learning_rate=la.FLOAT32_LEARNING_RATE, **config, **TERMS)
    _, metrics = la.moved(actor, data)
    packets: list[Any] = [None, None]
    torch.distributed.all_gather_object(packets, take_packets(metrics))
    return whole(module), packets


def fsdp1(module: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    mesh = init_device_mesh("cpu", (2,))
    return FullyShardedDataParallel(module, use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))


def fsdp2(module: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def whole(module: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

    if isinstance(module, Fsdp1):
        with Fsdp1.summon_full_params(module):
            return {name: value.detach().clone() for name, value in module.module.named_parameters()}
    return {name: value.detach().full_tensor().clone() for name, value in module.named_parameters()}


def ulysses(rank: int, record: str) -> tuple[Any, Any]:
    """Both ranks take all rows; ``packed`` replaces flash-attn's kernel, which does not exist for CPUs."""
    from torch.distributed.device_mesh import init_device_mesh

    import verl.models.transformers.monkey_patch as verls
    from tests.support import legacy_actor as la
    from tests.support.specs import STACK
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    verls._flash_attention_forward = packed
    module = la.model()
    verls.apply_monkey_patch(module, ulysses_sp_size=2, use_remove_padding=True)
    module.config._attn_implementation = "flash_attention_2"
    module = fsdp2(module)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    set_ulysses_sequence_parallel_group(mesh["sp"].get_group())
    config = dict(ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=4, use_remove_padding=True)
    return update(module, la.handed(la.rollout(), STACK, record=record), config | {"ulysses_sequence_parallel_size": 2})


def packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    query_length: int,
    *args: Any,
    position_ids: torch.Tensor,
    softmax_scale: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Causal attention over concatenated sequences, each of which begins at position 0; (1, tokens, heads, size)."""
    sequence = (position_ids[0] == 0).cumsum(0)
    tokens = torch.arange(len(sequence))
    allowed = (sequence[:, None] == sequence[None, :]) & (tokens[:, None] >= tokens[None, :])
    heads = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(heads, 2), value.repeat_interleave(heads, 2)))
    attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=allowed, scale=softmax_scale).transpose(1, 2)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(main, args=(sys.argv[1], free_port), nprocs=2)
