"""The factor of a batch, what is told to the workers, the verdict on their reports, and start-up checks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.offpolicy.batch.plan import decide_rollout
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.vcpo import EssLr, EssLrSettings, OptimalBaseline
from recipe.offpolicy.proof.verify import LivenessError
from tests.support.corrections import TIS, spec
from tests.support.shaped import Rows, make_batch, shape

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")

ROWS: Rows = [("a", 2, 1.0), ("a", 2, 0.0)]
RATIOS = torch.tensor([[1.0, 4.0], [1.0, 0.5]])
"""TIS caps them at 2: ess = (1 + 2 + 1 + 0.5)^2 / (4 * (1 + 4 + 1 + 0.25)) = 0.81; before, 6.5^2 / (4 * 18.25)."""


def weighed(correction: CorrectionSpec) -> Any:
    def decide(found: Any) -> Any:
        tensors = found.batch.select("response_mask")
        mu = torch.zeros(2, tensors["response_mask"].shape[1])
        old = mu.clone()
        old[:, :2] = RATIOS.log()
        return decide_rollout(correction, tensors.update({"old_log_probs": old, "rollout_log_probs": mu}), 1)

    return make_batch(ROWS, decide=decide)


def seen(factor: float | None, *read: float, planned: float = 0.01, stepped: bool = True) -> SimpleNamespace:
    return SimpleNamespace(factor=factor, planned=(planned,), read=read or None, stepped=stepped)


def run(correction: CorrectionSpec, **settings: Any) -> EssLr:
    extension = EssLr("ess_lr", {"rule": "sqrt"} | settings)
    shape(weighed(correction), extension)
    return extension


def test_next_to_the_optimal_baseline_the_batch_is_weighed_once() -> None:
    view, scaled = weighed(spec(TIS)), EssLr("ess_lr", {"rule": "linear"})
    decide, calls = view._decide, itertools.count()

    def counted(found: Any) -> Any:
        next(calls)
        return decide(found)

    view._decide = counted
    found = shape(view, OptimalBaseline("optimal_baseline", {"over": "group"}), scaled)
    # e = 1 + 4 and 1 + 0.25, so b = 5 / 6.25 = 0.8.
    assert found.tolist() == pytest.approx([0.2, -0.8])
    assert scaled.metrics()["ess_lr/factor"] == pytest.approx(0.81)
    assert next(calls) == 1


@pytest.mark.parametrize(
    ("correction", "settings", "factor"),
    [
        (spec(TIS), {}, 0.9),
        (spec(TIS), {"rule": "linear"}, 0.81),
        (spec(TIS), {"rule": "linear", "floor": 0.85}, 0.85),
        (CorrectionSpec(), {"rule": "linear"}, 6.5**2 / (4 * 18.25)),
    ],
)
def test_the_factor_is_of_this_batch(correction: CorrectionSpec, settings: Any, factor: float) -> None:
    extension = run(correction, **settings)
    (told,) = AddOns([extension]).batch_flags().values()
    assert told == extension.metrics()["ess_lr/factor"]
    assert told == pytest.approx(factor)


@pytest.mark.parametrize(("ess", "factor"), [(1.0, 1.0), (0.25, 0.5), (0.0, 0.1), (1e-9, 0.1), (float("nan"), 0.1)])
def test_the_factor_stays_within_its_bounds(ess: float, factor: float) -> None:
    assert EssLrSettings("sqrt", 0.1).compute_factor(ess) == factor


def test_a_healthy_update_is_proved_and_logged() -> None:
    extension = run(spec(TIS))
    due = 0.01 * extension.metrics()["ess_lr/factor"]
    told = extension.metrics()["ess_lr/factor"]
    assert "ess_lr.rule" in str(extension.unproved())
    metrics: dict[str, Any] = {"offpolicy_lr_report": [[seen(told, due)], [seen(told, due), seen(told, stepped=False)]]}
    extension.on_update(metrics, None)
    assert (metrics, extension.unproved()) == ({}, None)
    assert extension.metrics() == pytest.approx({"ess_lr/ess": 0.81, "ess_lr/factor": 0.9, "ess_lr/lr": 0.009})


def test_an_update_of_a_warm_up_at_zero_proves_nothing() -> None:
    extension = run(spec(TIS))
    told = extension.metrics()["ess_lr/factor"]
    extension.on_update({"offpolicy_lr_report": [seen(told, 0.0, planned=0.0)]}, None)
    assert extension.unproved() is not None


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([], "its learning rate is unknown"),
        ([None], "its learning rate is unknown"),
        ([seen(None, 0.01)], "the worker's factor is None"),
        ([seen(0.5, 0.005)], "the worker's factor is 0.5"),
        ([seen(0.9, 0.01)], "stepped at a learning rate of 0.01 instead of 0.009"),
        ([seen(0.9, 0.0081)], "0.0081 instead of 0.009"),
        ([seen(0.9)], "did not step"),
    ],
)
def test_a_step_at_another_rate_stops_the_run(reports: list[Any], said: str) -> None:
    extension = run(spec(TIS))
    extension._factor = 0.9
    with pytest.raises(LivenessError, match=said):
        extension.on_update({"offpolicy_lr_report": [reports]}, None)
