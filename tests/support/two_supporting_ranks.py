"""Two ranks of a real worker that replays the support, half of the rows each: two_supporting_ranks.py MODEL OUT."""

from __future__ import annotations

import socket
import sys
from functools import partial
from pathlib import Path

import torch.multiprocessing as mp


def main(rank: int, model: str, out: str, port: int) -> None:
    import torch

    from tests.support import supporting_worker as sw
    from tests.support import training_worker as tw

    tw.join_process_group(rank, 2, port)
    from recipe.offpolicy.batch.plan import take_reports
    from recipe.offpolicy.support.fsdp_engine import REPORT
    from recipe.offpolicy.support.support_replay import judge
    from recipe.offpolicy.support.support_settings import SupportSettings
    from verl.workers.utils.losses import ppo_loss

    sent = torch.load(Path(out) / "rows.pt", weights_only=False)
    worker = sw.start(Path(model), checkpointing=True)
    data = sw.with_notes(sent["rows"], sw.note_rows(sent["rows"], sent["supports"]))
    mine = sw.flagged(data.chunk(2)[rank])
    metrics, gradient = tw.gradients(worker, partial(ppo_loss, config=tw.actor_config()), mine, micro_batch_size=2)
    if rank == 0:
        reports = take_reports(metrics, REPORT)
        found, _ = judge(reports, SupportSettings(tw.VOCABULARY, "mask"), first=False)
        torch.save({"gradient": gradient, "metrics": found, "reports": len(reports)}, Path(out) / "ranks.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(main, args=(sys.argv[1], sys.argv[2], free_port), nprocs=2)
