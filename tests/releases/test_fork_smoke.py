"""The smoke test's update fails if the correction is dead."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import torch

from recipe.offpolicy import smoke
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.loss import OffPolicyLoss


def test_it_is_live_through_the_installed_verl() -> None:
    verdict = smoke.run_update()
    # 4 + 3 + 5 + 2 tokens, all with a gradient of their own before the correction.
    assert (verdict["proved"], verdict["gradient_tokens"], verdict["rows"]) == (1.0, 14.0, 4.0)
    assert verdict["gradient_error"] < 1e-5
    assert verdict["parameter_error"] < 1e-5


def drop_the_weight(loss: OffPolicyLoss, batch: Any, step: Any) -> Any:
    return batch.data_with(**{smoke.mb.WEIGHTS: step.keep.to(step.weight.dtype)})


def drop_the_mask(loss: OffPolicyLoss, batch: Any, step: Any) -> Any:
    return batch.data_with(**{smoke.mb.WEIGHTS: step.weight})


@pytest.mark.parametrize("sabotage", [drop_the_weight, drop_the_mask])
@pytest.mark.parametrize("judge", ["both", "the formulas alone"])
def test_a_dead_correction_is_found_by_either_judge(monkeypatch: pytest.MonkeyPatch, sabotage: Any, judge: str) -> None:
    monkeypatch.setattr(OffPolicyLoss, "hand_over", sabotage)
    if judge == "the formulas alone":
        monkeypatch.setattr(smoke, "verify", lambda *args, **kwargs: {"proved": 1.0})
    with pytest.raises(
        LivenessError, match=r"not weight \* keep" if judge == "both" else "of the parameters has a relative error of"
    ):
        smoke.run_update()


def test_a_step_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
    with pytest.raises(LivenessError, match="did not change the parameters"):
        smoke.run_update()


def test_the_command_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffPolicyLoss, "hand_over", drop_the_mask)
    with pytest.raises(SystemExit, match=r"NOT LIVE through verl [\d.]+ in "):
        smoke.main()
