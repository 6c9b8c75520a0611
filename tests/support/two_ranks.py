"""Two data-parallel ranks of a real TrainingWorker on the rollout that the tests make: two_ranks.py MODEL OUT."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch.multiprocessing as mp


def main(rank: int, model: str, out: str, port: int) -> None:
    import torch

    from tests.support import training_worker as tw

    tw.join_process_group(rank, 2, port)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.correction.statistics import merge_all
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from recipe.offpolicy.worker.metrics import take_packets
    from tests.support.first_update import planned
    from tests.support.specs import BATCH_WIDE, STACK

    worker = tw.start_worker(Path(model))
    rows = tw.add_log_probs(worker, tw.make_rollout(), mismatch=0.2)
    results = {}
    for name, mapping in {"stack": STACK, "batch_wide": BATCH_WIDE}.items():
        spec = CorrectionSpec.from_mapping(mapping)
        mine = planned(spec, rows, ranks=2).chunk(2)[rank]
        loss = OffPolicyLoss(spec, tw.actor_config())
        metrics, gradient = tw.gradients(worker, loss, mine, micro_batch_size=2)
        if rank == 0:
            merged = merge_all(packet.statistics for packet in take_packets(metrics))
            results[name] = {
                "loss": float(metrics["loss"][0]),
                "gradient": gradient,
                "statistics": {key: statistic.value() for key, statistic in merged.items()},
            }
    if rank == 0:
        torch.save(results, Path(out) / "ranks.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(main, args=(sys.argv[1], sys.argv[2], free_port), nprocs=2)
