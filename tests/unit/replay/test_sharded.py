"""Routes in models that FSDP shards over two processes, with activation checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.support.mixtures import KINDS
from tests.support.sharded_mixtures import RANKS, compare


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("family", KINDS)
def test_two_ranks_replay_as_one_model_does(family: str, how: str, tmp_path: Path) -> None:
    mp.spawn(compare, args=(str(tmp_path), family, how), nprocs=RANKS)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["entered"]
        assert found["own"]
        # Matrix products round by the number of rows that go through an expert.
        assert found["logits"] < 1e-4
        assert found["gradients"] < 1e-4
