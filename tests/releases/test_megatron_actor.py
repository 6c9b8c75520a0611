"""verl 0.7.1's legacy Megatron actor with a correction: two ranks on gloo, held against a plain float64 reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import megatron_program as mp
from tests.support.parity_case import CORRECTIONS, ROWS, Case
from tests.support.parity_update import expected

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.slow]

PLAIN = mp.Job("plain", None, patched=False)
NONE = mp.Job("none", {}, prove=True)
SHUFFLED = mp.Job("shuffled", CORRECTIONS["tis"], mini_batches=2, config={"shuffle": True, "data_loader_seed": 3})
REFERENCED = [job for job in mp.JOBS if job.witnessed] + [SHUFFLED]
layouts = pytest.mark.parametrize("layout", mp.LAYOUTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mp.deep_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return Case.of(folder)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> mp.Found:
    jobs = [PLAIN, NONE, *mp.JOBS, SHUFFLED]
    plan = {name: (layout, jobs) for name, layout in mp.LAYOUTS.items()}
    return mp.run(mp.LEGACY, folder, tmp_path_factory.mktemp("ranks"), plan)


@layouts
@pytest.mark.parametrize("job", REFERENCED, ids=lambda job: job.name)
def test_the_actor_makes_the_update_of_the_reference(found: mp.Found, case: Case, layout: str, job: mp.Job) -> None:
    """Weights, masks, loss and gradients, over all ranks and however the mini-batch is cut."""
    mp.assert_makes_the_reference(found[layout], job, case)


@layouts
def test_it_is_proved_live_on_the_last_stage(found: mp.Found, case: Case, layout: str) -> None:
    """Each micro-batch reports from the last stage, in the actor's own backward, and from nowhere else."""
    job = mp.of_job("proved")
    packets = [packet for rank in mp.on_last_stage(found[layout]) for packet in rank.seen[job.name].packets]
    live = mp.judged(packets, job, case)
    assert (live["proved"], live["rows"], live["parts"]) == (1.0, ROWS, 3.0)
    assert max(live["gradient_error"], live["shift_error"]) < 1e-5
    others = [rank.seen[job.name].packets for rank in found[layout] if not rank.last_stage]
    assert others == [[]] * (mp.LAYOUTS[layout].pipeline - 1)


@layouts
def test_a_micro_batch_without_a_token_adds_nothing(found: mp.Found, case: Case, layout: str) -> None:
    job = mp.of_job("silent")
    ranks = found[layout]
    assert [rank.seen[job.name].error for rank in ranks] == ["", ""]
    demanded = expected(mp.without_tokens(case, mp.SILENT), mp.STACKED, job.mode, range(ROWS))
    assert mp.gradient_error(ranks[0].seen[job.name].gradients[0], demanded.gradients) < 1e-5
    packets = [packet for rank in mp.on_last_stage(ranks) for packet in rank.seen[job.name].packets]
    assert mp.judged(packets, job, case)["rows"] == ROWS - len(mp.SILENT)


@layouts
def test_without_a_correction_it_is_verls_own_update_to_the_bit(found: mp.Found, layout: str) -> None:
    for rank in found[layout]:
        plain, none = rank.seen["plain"], rank.seen["none"]
        assert (plain.error, none.error) == ("", "")
        assert plain.losses == none.losses
        assert plain.gradients[0].keys() == none.gradients[0].keys()
        assert all(torch.equal(plain.gradients[0][name], none.gradients[0][name]) for name in plain.gradients[0])
        assert plain.packets == []
        assert len(none.packets) == len(none.losses)  # statistics come back all the same


def test_a_schedule_that_mixes_micro_batches_is_refused() -> None:
    from verl_patches.legacy import megatron_actor

    actor = SimpleNamespace(tf_config=SimpleNamespace(overlap_moe_expert_parallel_comm=True))
    dealt = megatron_actor.Dealt([], handover=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"overlap_moe_expert_parallel_comm=true: .* Set it to false"):
        megatron_actor._update_policy(lambda *_: {}, actor, dealt)


def test_the_contracts_hold_on_the_installed_release_and_notice_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from verl_patches.contract import PatchError
    from verl_patches.legacy import megatron_actor

    for contract, _ in megatron_actor.PATCH.wrappers:
        contract.check()
        moved = dataclasses.replace(contract, signature="(nothing)")
        with pytest.raises(PatchError, match="has moved"):
            moved.check()
