"""Two ranks on two CUDA devices, connected by NCCL, make the same update as one rank."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu_parity import compare_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.verl("==0.9.1")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_equal_one() -> None:
    _, figures = compare_ranks(dry_run=False)
    assert figures["backend"] == "NCCL"
