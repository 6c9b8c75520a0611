"""Two data-parallel ranks of a real TrainingWorker, each with half of the rows: two_ranks.py KIND MODEL OUT.

KIND is corrected (on the rollout that the tests make) or replaying (on the rows of OUT/rows.pt); the first rank writes
OUT/ranks.pt.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import verl.workers.engine_workers  # noqa: F401  once, in front of the fork
from recipe.offpolicy.batch.plan import take_reports
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.loss import OffPolicyLoss
from tests.support import replaying_worker
from tests.support import training_worker as tw
from tests.support.first_update import planned
from tests.support.specs import BATCH_WIDE, STACK


def corrected(rank: int, model: Path, out: Path) -> dict[str, Any]:
    worker = tw.start_worker(model)
    rows = tw.add_log_probs(worker, tw.make_rollout(), mismatch=0.2)
    results = {}
    for name, mapping in {"stack": STACK, "batch_wide": BATCH_WIDE}.items():
        spec = CorrectionSpec.from_mapping(mapping)
        mine = planned(spec, rows, ranks=2).chunk(2)[rank]
        metrics, gradient = tw.gradients(worker, OffPolicyLoss(spec, tw.actor_config()), mine, micro_batch_size=2)
        if rank == 0:
            results[name] = {
                "loss": float(metrics["loss"][0]),
                "gradient": gradient,
                "statistics": tw.measured(metrics),
            }
    return results


def replaying(rank: int, model: Path, out: Path) -> dict[str, Any]:
    from recipe.offpolicy.replay import fsdp_engine
    from recipe.offpolicy.replay.routing_replay import judge, measure_routes

    # The routes are of no router's choice.
    fsdp_engine.check_row_order = fsdp_engine.check_layer_order = lambda records: None
    sent = torch.load(out / "rows.pt", weights_only=False)
    worker = replaying_worker.start(model, "R3", checkpointing=True)
    data = replaying_worker.with_routes(sent["rows"].to_tensordict(), sent["routes"])
    mine = replaying_worker.flagged(data.chunk(2)[rank])
    metrics, gradient = tw.gradients(worker, tw.plain_loss(), mine, micro_batch_size=2)
    reports = take_reports(metrics, fsdp_engine.REPORT) if rank == 0 else []
    assert rank or "LIVE" in judge(reports, "R2", tokens=len(sent["routes"]))
    return {"gradient": gradient, "metrics": measure_routes(reports) if reports else {}, "reports": len(reports)}


def main(rank: int, kind: str, model: str, out: str, port: int) -> None:
    tw.join_process_group(rank, 2, port)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    results = {"corrected": corrected, "replaying": replaying}[kind](rank, Path(model), Path(out))
    if rank == 0:
        torch.save(results, Path(out) / "ranks.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    method = "spawn" if torch.cuda.is_available() else "fork"
    mp.start_processes(main, args=(*sys.argv[1:], free_port), nprocs=2, start_method=method)
