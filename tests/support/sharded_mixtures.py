"""Two ranks of a sharded mixture that replays, each with one row of the batch, against the same model in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.mixtures import (
    TOKENS,
    WIDTH,
    build_mixture,
    compute_gradients,
    draw_routes,
    draw_tokens,
    set_checkpointing,
)

RANKS = 2


def shard(model: Any, how: str) -> Any:
    """The model by FSDP1 or FSDP2, a unit for each layer."""
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def gather_gradients(model: Any, gradients: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """Whole gradients by the names of the model in one piece."""
    if how == "fsdp2":
        return {name: gradient.full_tensor() for name, gradient in gradients.items()}  # type: ignore[attr-defined]
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {
            name.replace("_fsdp_wrapped_module.", ""): weight.grad.clone()
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }


def _keep(result: tuple[Tensor, dict[str, Tensor]], how: str) -> list[Tensor]:
    """Copies of logits and of this rank's gradients."""
    parts = [gradient.to_local() if how == "fsdp2" else gradient for gradient in result[1].values()]  # type: ignore[attr-defined]
    return [result[0].detach().clone(), *(part.clone() for part in parts)]


def compare(rank: int, out: str, family: str, how: str) -> None:
    """Save what one rank finds: the largest difference of its logits and of the gradients, and whether routes entered.

    And whether its own routes are the sharded model without them, to the bit.

    Loss and gradients of ranks are averaged by FSDP; the loss of the model in one piece is a sum.
    """
    from recipe.offpolicy.replay.routed_model import install_replay

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=RANKS)
    whole = build_mixture(family)
    routed = install_replay(whole)
    routes = draw_routes(dense=len(routed.layout.dense))
    routed.arm(routes)
    logits, gradients = compute_gradients(whole)

    model = build_mixture(family)
    set_checkpointing(model, True)
    model = shard(model, how)
    routed = install_replay(model)
    row = draw_tokens()[rank : rank + 1]
    routed.record_own()
    native = _keep(compute_gradients(model, row), how)
    routed.arm(routed.stack_ids())
    same = _keep(compute_gradients(model, row), how)
    mine = routes[rank * WIDTH : (rank + 1) * WIDTH]
    assert len(routes) == TOKENS == RANKS * WIDTH
    routed.arm(mine)
    found, parts = compute_gradients(model, row)
    entered = torch.equal(routed.stack_ids(), mine)
    sums = {name: gradient * RANKS for name, gradient in gather_gradients(model, parts, how).items()}
    assert sums.keys() == gradients.keys()
    result = {
        "entered": entered,
        "own": len(native) == len(same) and all(map(torch.equal, native, same)),
        "logits": float((found[0] - logits[rank]).abs().max()),
        "gradients": max(
            float((sums[name] - gradient).norm() / (gradient.norm() + 1e-6)) for name, gradient in gradients.items()
        ),
    }
    torch.save(result, Path(out) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
