"""Two ranks of verl 0.7.1's legacy FSDP actor make the same update as one process with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.offpolicy.recording import Recording
from tests.support import legacy_actor as la
from tests.support import legacy_ranks
from tests.support.paths import ROOT
from tests.support.specs import BATCH_WIDE, STACK

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.slow]

TERMS: dict[str, Any] = dict(entropy=0.1, kl=0.3, learning_rate=la.FLOAT32_LEARNING_RATE)
TWO_STEPS = (0, 1, 4, 5, 2, 3, 6, 7)
"""Rows in the order in which two ranks with four rows each process them, two at a time."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of ``legacy_ranks.py``, and what both ranks recorded."""
    out = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "legacy_ranks.py"), str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def ranks(out: Path) -> Any:
    return torch.load(out / "ranks.pt", weights_only=False)


def expected(steps: str, mapping: dict[str, Any]) -> la.Parameters:
    return la.plain_update(in_order(steps), la.Plain(mapping, mini_rows=8 if steps == "one" else 4, **TERMS))


def in_order(steps: str) -> dict[str, torch.Tensor]:
    order = list(range(8) if steps == "one" else TWO_STEPS)
    return {name: column[order] for name, column in legacy_ranks.rollout(steps).items()}


@pytest.mark.parametrize("steps", legacy_ranks.STEPS)
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_data_parallel_ranks_make_the_plain_update(ranks: Any, sharding: str, steps: str) -> None:
    parameters, packets = ranks[f"{sharding} stack {steps}"]
    within = 1e-5 if sharding == "fsdp1" else 1e-10
    got = {name: value.double() for name, value in parameters.items()}
    assert la.distance(expected(steps, STACK), got, la.parameters(la.model())) < within
    assert live(STACK, packets, steps)["rows"] == 8.0


@pytest.mark.parametrize("steps", legacy_ranks.STEPS)
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_what_is_fixed_for_the_whole_batch_is_one_for_both_ranks(ranks: Any, sharding: str, steps: str) -> None:
    """The reference is one process, whose update another test compares with the plain reference."""
    import verl.workers.actor.dp_actor  # noqa: F401
    import verl_patches

    verl_patches.install("legacy")
    parameters, packets = ranks[f"{sharding} batch_wide {steps}"]
    rows = 8 if steps == "one" else 4
    with la.process_group():
        config = dict(ppo_mini_batch_size=rows, entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.3)
        actor = la.actor(learning_rate=la.FLOAT32_LEARNING_RATE, **config)
        single, _ = la.moved(actor, la.handed(in_order(steps), BATCH_WIDE, mini_rows=rows))
    got = {name: value.double() for name, value in parameters.items()}
    within = 1e-5 if sharding == "fsdp1" else 1e-10
    assert la.distance(single, got, la.parameters(la.model())) < within
    assert live(BATCH_WIDE, packets, steps)["rows"] == 8.0


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_old_log_probs_of_unequal_ranks(ranks: Any, sharding: str) -> None:
    """There is no handover; rank 0 needs three micro-batches for its 37 tokens, rank 1 needs one for 13."""
    batch = legacy_ranks.rollout("dynamic")
    with torch.no_grad():
        expected = la.forward(la.model(), batch)[0]
    values, passes = zip(*ranks[f"{sharding} log_probs"], strict=True)
    assert passes == (3, 3)
    mask = batch["response_mask"].bool()
    within = 1e-5 if sharding == "fsdp1" else 1e-10
    torch.testing.assert_close(torch.cat(values).double()[mask], expected[mask], rtol=0, atol=within)


def test_ulysses_makes_the_plain_update(ranks: Any) -> None:
    """Both ranks have the same rows, so one rank's packets are those of the batch."""
    parameters, packets = ranks["ulysses"]
    assert la.distance(expected("one", STACK), parameters, la.parameters(la.model())) < 1e-10
    for packet in packets:
        assert live(STACK, [packet])["rows"] == 8.0


def live(mapping: dict[str, Any], packets: Any, steps: str = "one") -> dict[str, float]:
    from tensordict import TensorDict

    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.proof.verify import verify
    from tests.support.sampled_rows import compute_sampled_checksums

    dtype = torch.float64 if packets[0][0].proof.log_prob_bits == 64 else torch.float32
    sampled = compute_sampled_checksums(TensorDict(legacy_ranks.rollout(steps, dtype), batch_size=8))
    flat = [packet for rank in packets for packet in rank]
    verdict = verify(flat, CorrectionSpec.from_mapping(mapping), sampled_rows=sampled)
    assert verdict["proved"] == 1.0
    return verdict


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_each_rank_records_its_own_rows(out: Path, sharding: str) -> None:
    parts = Recording(out / sharding).parts(1)
    assert [part.rows.uid.tolist() for part in parts] == [[f"row{i}" for i in range(n, n + 4)] for n in (0, 4)]
    assert [part.rows.mini_batch.tolist() for part in parts] == [[0, 0, 1, 1]] * 2


def test_ranks_that_share_sequences_record_once(out: Path) -> None:
    recording = Recording(out / "ulysses")
    assert [path.name for path in recording.files[1]] == ["step_00000001.rank_00000.parquet"]
    assert recording.step(1).rows.uid.tolist() == [f"row{i}" for i in range(8)]
