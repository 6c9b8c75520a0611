"""A learning rate that follows the effective sample size, and the optimal baseline."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import decide_rollout
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.vcpo import EssLr, OptimalBaseline, compute_advantages
from recipe.offpolicy.proof.verify import LivenessError
from tests.support.corrections import TIS, band, spec
from tests.support.shaped import WIDTH, Rows, make_batch, make_queue_batch, nest, shape

ESS_LR = pytest.mark.verl("==0.9.1")
"""Releases in which the learning rate can be scaled."""

pytest.importorskip("verl")

TWO_ROWS: Rows = [("a", 2, 1.0), ("a", 2, 0.0)]
RATIOS = torch.tensor([[1.0, 4.0], [1.0, 0.5]])
"""Ratios; TIS caps them at 2: ess = (1 + 2 + 1 + 0.5)^2 / (4 * (1 + 4 + 1 + 0.25)) = 0.81; without the cap, 6.5^2 / (4
* 18.25).
"""


def weighed(correction: CorrectionSpec) -> Any:
    def decide(found: Any) -> Any:
        tensors = found.batch.select("response_mask")
        mu = torch.zeros(2, tensors["response_mask"].shape[1])
        old = mu.clone()
        old[:, :2] = RATIOS.log()
        return decide_rollout(correction, tensors.update({"old_log_probs": old, "rollout_log_probs": mu}), 1)

    return make_batch(TWO_ROWS, decide=decide)


def seen(factor: float | None, *read: float, planned: float = 0.01, stepped: bool = True) -> SimpleNamespace:
    return SimpleNamespace(factor=factor, planned=(planned,), read=read or None, stepped=stepped)


def scale(correction: CorrectionSpec, **settings: Any) -> EssLr:
    extension = EssLr("ess_lr", {"rule": "sqrt"} | settings)
    shape(weighed(correction), extension)
    return extension


@ESS_LR
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
    extension = scale(correction, **settings)
    (told,) = AddOns([extension]).batch_flags().values()
    assert told == extension.metrics()["ess_lr/factor"]
    assert told == pytest.approx(factor)


@ESS_LR
def test_a_healthy_update_is_proved_and_logged() -> None:
    extension = scale(spec(TIS))
    due = 0.01 * extension.metrics()["ess_lr/factor"]
    told = extension.metrics()["ess_lr/factor"]
    assert "ess_lr.rule" in str(extension.unproved())
    metrics: dict[str, Any] = {"offpolicy_lr_report": [[seen(told, due)], [seen(told, due), seen(told, stepped=False)]]}
    extension.on_update(metrics, None)
    assert (metrics, extension.unproved()) == ({}, None)
    assert extension.metrics() == pytest.approx({"ess_lr/ess": 0.81, "ess_lr/factor": 0.9, "ess_lr/lr": 0.009})


@ESS_LR
def test_an_update_of_a_warm_up_at_zero_proves_nothing() -> None:
    extension = scale(spec(TIS))
    told = extension.metrics()["ess_lr/factor"]
    extension.on_update({"offpolicy_lr_report": [seen(told, 0.0, planned=0.0)]}, None)
    assert extension.unproved() is not None


@ESS_LR
@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([None], "its learning rate is unknown"),
        ([seen(None, 0.01)], "the worker received the factor None"),
        ([seen(0.5, 0.005)], "the worker received the factor 0.5"),
        ([seen(0.9, 0.01)], "stepped at a learning rate of 0.01 instead of 0.009"),
        ([seen(0.9)], "did not step"),
    ],
)
def test_a_step_at_another_rate_stops_the_run(reports: list[Any], said: str) -> None:
    extension = scale(spec(TIS))
    extension._factor = 0.9
    with pytest.raises(LivenessError, match=said):
        extension.on_update({"offpolicy_lr_report": [reports]}, None)


# The extension on verl's own batches: weights of the correction, verl's aggregation, proof and start-up checks


ROWS: Rows = [("a", 4, 1.0), ("a", 2, 0.0), ("a", 6, 0.5), ("b", 3, 1.0), ("b", 3, 0.0), ("alone", 5, 1.0)]
LENGTHS = torch.tensor([tokens for _, tokens, _ in ROWS])
SCORES = [score for _, _, score in ROWS]
NONE = CorrectionSpec()
SEQUENCE = spec({"level": "sequence", "kind": "truncate", "lower": None, "upper": 2.0})
CORRECTIONS = {"none": NONE, "token": spec(TIS), "sequence": SEQUENCE, "with a mask": spec(TIS, far=band(0.9, 1.1))}


def draw() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    old = -2 * torch.rand(len(ROWS), WIDTH, generator=generator)
    return old, old - 0.6 * torch.randn(len(ROWS), WIDTH, generator=generator)


def made(aggregation: str = "token-mean", over: str = "group") -> OptimalBaseline:
    extension = OptimalBaseline("optimal_baseline", {"over": over})
    actor = {"ppo_mini_batch_size": 2, "loss_agg_mode": aggregation}
    extension.begin(OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": {"n": 3}}}))
    return extension


def batch(correction: CorrectionSpec, rows: Rows = ROWS) -> Any:
    old, mu = draw()

    def decide(found: Any) -> Any:
        tensors = found.batch.select("response_mask")
        return decide_rollout(correction, tensors.update({"old_log_probs": old, "rollout_log_probs": mu}), 1)

    return make_batch(rows, decide=decide)


def weigh_by_hand(name: str) -> list[list[float]]:
    old, mu = draw()
    found = []
    for row, length in enumerate(LENGTHS.tolist()):
        logs = (old - mu)[row, :length].double()
        if name == "none":
            weights = [1.0] * length
        elif name == "sequence":
            weights = [min(float(logs.sum().exp()), 2.0)] * length
        else:
            keep = name == "token" or 0.9 <= float(logs.mean().exp()) <= 1.1
            weights = [min(float(each.exp()), 2.0) * keep for each in logs]
        found.append(weights)
    return found


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("over", ["group", "leave_one_out"])
def test_each_group_gets_the_loop_by_hand(name: str, aggregation: str, over: str) -> None:
    view = batch(CORRECTIONS[name])
    found = shape(view, made(aggregation, over))
    energy = [
        sum(w * w for w in row) / (len(row) ** 2 if aggregation == "seq-mean-token-mean" else 1)
        for row in weigh_by_hand(name)
    ]
    for group in ([0, 1, 2], [3, 4], [5]):
        wanted = state([SCORES[i] for i in group], [energy[i] for i in group], over == "leave_one_out")
        assert found[group].tolist() == pytest.approx(wanted, abs=1e-6)
    assert not bool((view.advantages * (1 - view.batch.batch["response_mask"])).any())
    assert torch.equal(view.batch.batch["returns"], view.advantages)


def test_the_view_of_v1_weighs_the_same_without_padding_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    old, mu = draw()
    lengths, pad = [*LENGTHS.tolist(), 1], torch.zeros(1, WIDTH)

    def nested(values: Tensor) -> Tensor:
        return nest([row[:length] for row, length in zip(torch.cat([values, pad]), lengths, strict=True)])

    mask = nested(torch.ones_like(old))
    mask.values()[-1] = 0.0
    columns = {"response_mask": mask, "old_log_probs": nested(old), "rollout_log_probs": nested(mu)}
    stored = TensorDict(columns, batch_size=len(lengths))
    keys = [*(f"a_{i}_0" for i in range(6)), "pad_0_0"]
    view = make_queue_batch(monkeypatch, columns, keys, decide=lambda _: decide_rollout(SEQUENCE, stored, 1))
    weights, statistics = view.weigh()
    padded, of_v0 = batch(SEQUENCE).weigh()
    assert torch.equal(weights, padded[:, : weights.shape[1]])
    assert float(statistics["weight/ess"].value()) == pytest.approx(float(of_v0["weight/ess"].value()))


def test_rejected_rows_leave_the_group_and_idle_groups_are_counted() -> None:
    view = batch(spec(None, all=band(1e3, 1e4)))
    extension = made()
    assert not bool(shape(view, extension).any())
    assert extension.metrics()["optimal_baseline/idle_groups"] == 3.0
    view = batch(NONE)
    view.regroup(["a", "a/rejected-1", "a", "b", "b", "alone"], [False, True, False, False, False, False])
    found = shape(view, made())
    assert found[:3].tolist() == pytest.approx([1 - 7 / 10, 0.0, 0.5 - 7 / 10])


def test_metrics_by_hand() -> None:
    """Tokens 4, 2, 6: b = 7 / 12 compared with a mean of 1 / 2; 3 and 3: both 1 / 2."""
    extension = made()
    shape(batch(NONE), extension)
    assert extension.metrics() == pytest.approx(
        {
            "optimal_baseline/shift": (1 / 12) / 2,
            "optimal_baseline/largest_share": (1 / 2 + 1 / 2) / 2,
            "optimal_baseline/idle_groups": 1.0,
        }
    )


# The baseline against a float64 loop, its variance by enumeration, and its bias


GROUPS = st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1e6) | st.just(5e-324)), min_size=1, max_size=9)
LEAVE_ONE_OUT = pytest.mark.parametrize("leave_one_out", [False, True])


def state(rewards: list[float], energy: list[float], leave_one_out: bool) -> list[float]:
    stated = []
    for i, reward in enumerate(rewards):
        others = [j for j in range(len(rewards)) if j != i or not leave_one_out]
        most = max((energy[j] for j in others), default=0.0)
        shares = [energy[j] / most for j in others] if most > 0 else []
        above = math.fsum(share * (reward - rewards[j]) for share, j in zip(shares, others, strict=False))
        stated.append(above / math.fsum(shares) if shares else 0.0)
    return stated


@LEAVE_ONE_OUT
@given(group=GROUPS)
def test_it_is_the_loop_in_float64(leave_one_out: bool, group: list[tuple[float, float]]) -> None:
    rewards, energy = (list(column) for column in zip(*group, strict=True))
    found = compute_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(energy, dtype=torch.float64),
        leave_one_out=leave_one_out,
    )
    assert found.tolist() == pytest.approx(state(rewards, energy, leave_one_out), abs=1e-9)
