"""Two ranks of a real worker that replays, each with half of the rows: two_replaying_ranks.py MODEL OUT."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch.multiprocessing as mp


def main(rank: int, model: str, out: str, port: int) -> None:
    import torch

    from tests.support import replaying_worker as rw
    from tests.support import training_worker as tw

    tw.join_process_group(rank, 2, port)
    from functools import partial

    from recipe.offpolicy.batch.plan import take_reports
    from recipe.offpolicy.replay import fsdp_engine
    from recipe.offpolicy.replay.routing_replay import judge, measure_routes
    from verl.workers.utils.losses import ppo_loss

    # The routes are of no router's choice.
    fsdp_engine.check_row_order = fsdp_engine.check_layer_order = lambda records: None
    sent = torch.load(Path(out) / "rows.pt", weights_only=False)
    worker = rw.start(Path(model), "R3", checkpointing=True)
    rows = sent["rows"].to_tensordict()
    data = rw.with_routes(rows, sent["routes"])
    mine = rw.flagged(data.chunk(2)[rank])
    metrics, gradient = tw.gradients(worker, partial(ppo_loss, config=tw.actor_config()), mine, micro_batch_size=2)
    if rank == 0:
        reports = take_reports(metrics, fsdp_engine.REPORT)
        assert "LIVE" in judge(reports, "R2", tokens=len(sent["routes"]))
        found = {"gradient": gradient, "metrics": measure_routes(reports), "reports": len(reports)}
        torch.save(found, Path(out) / "ranks.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(main, args=(sys.argv[1], sys.argv[2], free_port), nprocs=2)
