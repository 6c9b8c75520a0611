"""verl 0.9.1's Megatron engine with a correction: two ranks on gloo, held against a plain float64 reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import megatron_program as mp
from tests.support.parity_case import ROWS, Case
from tests.support.parity_update import expected

pytestmark = [pytest.mark.verl("==0.9.1"), pytest.mark.slow, pytest.mark.extended]

REFERENCED = [job for job in mp.JOBS if job.witnessed]
PROVED = mp.of_job("proved")
WITHOUT_TOKENS = mp.of_job("silent")
layouts = pytest.mark.parametrize("layout", mp.LAYOUTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mp.deep_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return Case.of(folder)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> mp.Found:
    plan = {name: (layout, mp.JOBS) for name, layout in mp.LAYOUTS.items()}
    plan["bfloat16"] = (mp.Layout(data=2, dtype="bfloat16"), [mp.of_job("tis"), PROVED])
    return mp.run(mp.ENGINE, folder, tmp_path_factory.mktemp("ranks"), plan)


@layouts
@pytest.mark.parametrize("job", REFERENCED, ids=lambda job: job.name)
def test_the_engine_makes_the_update_of_the_reference(found: mp.Found, case: Case, layout: str, job: mp.Job) -> None:
    """Weights, masks, loss and gradients, over all ranks and however the mini-batch is cut."""
    mp.assert_makes_the_reference(found[layout], job, case)


@layouts
def test_it_is_proved_live_on_the_last_stage(found: mp.Found, case: Case, layout: str) -> None:
    """The packets of all data-parallel ranks come back from the ranks that verl collects from, and from no other."""
    packets = mp.on_last_stage(found[layout])[0].seen[PROVED.name].packets
    live = mp.judged(packets, PROVED, case)
    assert (live["proved"], live["rows"], live["parts"]) == (1.0, ROWS, 3.0)
    assert max(live["gradient_error"], live["shift_error"]) < 1e-5
    answering = [bool(rank.seen[PROVED.name].packets) for rank in found[layout]]
    assert answering == [rank.last_stage and rank.tensor == 0 for rank in found[layout]]


@layouts
def test_a_micro_batch_without_a_token_adds_nothing(found: mp.Found, case: Case, layout: str) -> None:
    ranks = found[layout]
    assert [rank.seen[WITHOUT_TOKENS.name].error for rank in ranks] == ["", ""]
    demanded = expected(mp.without_tokens(case, mp.SILENT), mp.STACKED, "token-mean", range(ROWS))
    gradients = ranks[0].seen[WITHOUT_TOKENS.name].gradients[0]
    assert mp.gradient_error(gradients, demanded.gradients) < 1e-5
    packets = mp.on_last_stage(ranks)[0].seen[WITHOUT_TOKENS.name].packets
    assert mp.judged(packets, WITHOUT_TOKENS, case)["rows"] == ROWS - len(mp.SILENT)


def test_in_16_bits_it_is_the_same_update_as_far_as_they_tell(found: mp.Found, case: Case) -> None:
    """What whole runs train in: verl's configuration of the engine admits no other type."""
    job, ranks = mp.of_job("tis"), found["bfloat16"]
    ((update, _),) = mp.updates(ranks, job)
    mp.assert_same_in_bf16(update, case, job)
    live = mp.judged(ranks[0].seen[PROVED.name].packets, PROVED, case)
    assert (live["proved"], live["rows"]) == (1.0, ROWS)
    assert max(live["gradient_error"], live["shift_error"]) < 1e-4  # log-probs are float32 all the same
