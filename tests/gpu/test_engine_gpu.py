"""verl's engine on a CUDA device: the update equals the float64 reference, is proved live, and has the same statistics.

The tests use float32 with sdpa, also with weights and optimizer in host memory, and bfloat16 on packed rows, with sdpa
and, if it is installed, with flash-attn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import first_update as fu
from tests.support import training_worker as tw
from tests.support.parity_case import BFLOAT16, CORRECTIONS, FOR_BFLOAT16, MODES, ROWS, Case, tiny_model
from tests.support.parity_paths import Witness, batch_v0, batch_v1, register_witness, update_by_engine
from tests.support.parity_update import assert_same, expected, measure_errors

pytestmark = [pytest.mark.gpu, pytest.mark.verl("==0.9.1")]
CASES = [(name, "token-mean") for name in CORRECTIONS] + [("stacked", mode) for mode in MODES[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return Case.of(folder)


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    tw.join_process_group()


@pytest.fixture(scope="module", params=[{}, {"use_remove_padding": True}, {"offload": True}], ids=str)
def worker(folder: Path, request: pytest.FixtureRequest) -> Any:
    return tw.start_worker(folder, **request.param)


@pytest.fixture(scope="module", params=["sdpa", "flash_attention_2"])
def rounding(folder: Path, request: pytest.FixtureRequest) -> Any:
    """A worker that computes in bfloat16 on packed rows."""
    if request.param == "flash_attention_2":
        pytest.importorskip("flash_attn")
    return tw.start_worker(folder, attention=request.param, precision="bfloat16", use_remove_padding=True)


@pytest.fixture
def witness(case: Case, monkeypatch: pytest.MonkeyPatch) -> Witness:
    return register_witness(case, monkeypatch)


@pytest.mark.parametrize("layout", [batch_v0, batch_v1])
@pytest.mark.parametrize("split", [2, 8, "dynamic"])
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_engine_makes_the_update_of_the_reference(
    worker: Any, case: Case, witness: Witness, layout: Any, split: Any, name: str, mode: str
) -> None:
    witness.case = case.of_correction(name)
    found = update_by_engine(worker, witness, layout, name, mode, split)
    assert_same(found, expected(witness.case, CORRECTIONS[name], mode, range(ROWS)))


@pytest.mark.parametrize("split", [2, "dynamic"])
@pytest.mark.parametrize("name", FOR_BFLOAT16)
def test_bfloat16_makes_the_update_of_the_reference_but_for_rounding(
    rounding: Any, case: Case, witness: Witness, split: Any, name: str
) -> None:
    witness.case = case.of_correction(name)
    found = update_by_engine(rounding, witness, batch_v1, name, "token-mean", split)
    errors = measure_errors(found, expected(witness.case, CORRECTIONS[name], "token-mean", range(ROWS)))
    assert all(errors[what] <= limit for what, limit in BFLOAT16.items()), errors


def test_the_engine_is_on_the_device(worker: Any) -> None:
    with worker.engine.train_mode():
        assert next(worker.engine.module.parameters()).device.type == "cuda"


@pytest.mark.parametrize("name", FOR_BFLOAT16)
def test_the_first_update_is_proved_in_bfloat16(rounding: Any, name: str) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    assert fu.first_update(rounding, CORRECTIONS[name], tamper=fu.add_reference, **kl)["proved"] == 1.0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_first_update_is_proved(worker: Any, name: str) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    live = fu.first_update(worker, CORRECTIONS[name], tamper=fu.add_reference, **kl)
    assert live["proved"] == 1.0
    assert live["gradient_error"] < 1e-4


@pytest.mark.parametrize("name", CORRECTIONS)
def test_both_stages_decide_as_on_the_cpu(case: Case, name: str) -> None:
    from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage, turns

    spec = CorrectionSpec.from_mapping(CORRECTIONS[name])

    def stages(device: str) -> Any:
        columns = {key: value.to(device) for key, value in case.columns.items()}
        stage = rollout_stage(
            spec,
            old_log_prob=columns["old_log_probs"],
            rollout_log_prob=columns["rollout_log_probs"],
            response_mask=columns["response_mask"].bool(),
            segment_ids=turns(columns["response_mask"].bool()),
            staleness=torch.arange(ROWS, device=device) % 3,
        )
        return step_stage(spec, stage, log_prob=columns["ref_log_prob"], advantages=columns["advantages"])

    here, there = stages("cpu"), stages("cuda")
    assert torch.equal(here.keep, there.keep.cpu())
    torch.testing.assert_close(here.weight, there.weight.cpu(), rtol=1e-6, atol=0)
    assert here.statistics.keys() == there.statistics.keys()
    for key, statistic in here.statistics.items():
        assert float(there.statistics[key].value()) == pytest.approx(
            float(statistic.value()), rel=1e-9, abs=1e-12, nan_ok=True
        ), key
