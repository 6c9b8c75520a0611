"""verl's Megatron engine, and 0.7.1's legacy actor: two ranks on gloo, compared with a plain float64 reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import megatron_program as mp
from tests.support.parity_case import CORRECTIONS, ROWS, Case
from tests.support.parity_update import expected
from verl_patches.contract import PatchError, demand_release

LEGACY = demand_release() == "0.7.1"
pytestmark = [
    pytest.mark.verl("!=0.8.0,!=0.9.0"),
    pytest.mark.slow,
    *([] if LEGACY else [pytest.mark.extended]),
]
of_the_actor, of_the_engine = pytest.mark.verl("==0.7.1"), pytest.mark.verl("==0.9.1")
layouts = pytest.mark.parametrize("layout", mp.LAYOUTS)

PLAIN = mp.Job("plain", None, patched=False)
NONE = mp.Job("none", {}, prove=True)
SHUFFLED = mp.Job("shuffled", CORRECTIONS["tis"], mini_batches=2, config={"shuffle": True, "data_loader_seed": 3})
PROVED, SILENT = mp.of_job("proved"), mp.of_job("silent")
WITNESSED: list[Any] = [job for job in mp.JOBS if job.witnessed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mp.deep_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return Case.of(folder)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> mp.Found:
    program, jobs = (mp.LEGACY, [PLAIN, NONE, *mp.JOBS, SHUFFLED]) if LEGACY else (mp.ENGINE, mp.JOBS)
    plan = {name: (layout, jobs) for name, layout in mp.LAYOUTS.items()}
    if not LEGACY:
        plan["bfloat16"] = (mp.Layout(data=2, dtype="bfloat16"), [mp.of_job("tis"), PROVED])
    return mp.run(program, folder, tmp_path_factory.mktemp("ranks"), plan)


def judge(ranks: list[mp.Rank], job: mp.Job, case: Case) -> dict[str, float]:
    """Return the verdict on the packets: verl's worker gathers those of all data-parallel ranks, the actor only its
    own.
    """
    answering = mp.on_last_stage(ranks)
    packets = [packet for rank in (answering if LEGACY else answering[:1]) for packet in rank.seen[job.name].packets]
    return mp.judged(packets, job, case)


@layouts
@pytest.mark.parametrize(
    "job", [*WITNESSED, pytest.param(SHUFFLED, marks=of_the_actor)], ids=lambda job: getattr(job, "name", None)
)
def test_it_makes_the_update_of_the_reference(found: mp.Found, case: Case, layout: str, job: mp.Job) -> None:
    """Weights, masks, loss and gradients are compared over all ranks, for every split of the mini-batch."""
    mp.assert_makes_the_reference(found[layout], job, case)


@layouts
def test_it_is_proved_live_on_the_last_stage(found: mp.Found, case: Case, layout: str) -> None:
    """Packets come only from the last stage (for the engine, from the ranks that verl collects)."""
    live = judge(found[layout], PROVED, case)
    assert (live["proved"], live["rows"], live["parts"]) == (1.0, ROWS, 3.0)
    assert max(live["gradient_error"], live["shift_error"]) < 1e-5
    answering = [bool(rank.seen[PROVED.name].packets) for rank in found[layout]]
    assert answering == [rank.last_stage and (LEGACY or rank.tensor == 0) for rank in found[layout]]


@layouts
def test_a_micro_batch_without_a_token_adds_nothing(found: mp.Found, case: Case, layout: str) -> None:
    ranks = found[layout]
    assert [rank.seen[SILENT.name].error for rank in ranks] == ["", ""]
    demanded = expected(mp.without_tokens(case, mp.SILENT), mp.STACKED, "token-mean", range(ROWS))
    assert mp.gradient_error(ranks[0].seen[SILENT.name].gradients[0], demanded.gradients) < 1e-5
    assert judge(ranks, SILENT, case)["rows"] == ROWS - len(mp.SILENT)


@of_the_engine
def test_in_16_bits_it_is_the_same_update_as_far_as_they_tell(found: mp.Found, case: Case) -> None:
    """Whole runs train in 16 bits, because verl's configuration of the engine accepts no other type."""
    job, ranks = mp.of_job("tis"), found["bfloat16"]
    ((update, _),) = mp.updates(ranks, job)
    mp.assert_same_in_bf16(update, case, job)
    live = judge(ranks, PROVED, case)
    assert (live["proved"], live["rows"]) == (1.0, ROWS)
    assert max(live["gradient_error"], live["shift_error"]) < 1e-4  # log-probs are float32 all the same


@of_the_actor
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


@of_the_actor
def test_a_schedule_that_mixes_micro_batches_is_refused() -> None:
    from verl_patches.legacy import megatron_actor

    actor = SimpleNamespace(tf_config=SimpleNamespace(overlap_moe_expert_parallel_comm=True))
    dealt = megatron_actor.Dealt([], handover=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"overlap_moe_expert_parallel_comm=true: .* Set it to false"):
        megatron_actor._update_policy(lambda *_: {}, actor, dealt)


@of_the_actor
def test_the_contracts_hold_on_the_installed_release_and_notice_what_moves() -> None:
    from verl_patches.legacy import megatron_actor

    for contract, _ in megatron_actor.PATCH.wrappers:
        contract.check()
        with pytest.raises(PatchError, match="has changed"):
            dataclasses.replace(contract, signature="(nothing)").check()
