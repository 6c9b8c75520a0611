"""verl's helper and our replacement are equal where verl's figure is right, and ours is right where verl's is not."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, SpecError, rollout_stage, step_stage
from recipe.offpolicy.translate.rollout_correction import verl_rollout_correction
from tests.support.examples import at_most, each_nth_by_default
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl_helper

Batch = tuple[Tensor, Tensor, Tensor]
Answer = tuple[DataProto | None, Tensor, dict[str, float]]

REJECTIONS = {
    "token_k1": "0.6_1.5",
    "token_k2": 0.1,
    "token_k3": "0.1",
    "seq_sum_k1": "0.5_3",
    "seq_sum_k2": 1.0,
    "seq_sum_k3": 1.0,
    "seq_mean_k1": 1.05,
    "seq_mean_k2": "0.05",
    "seq_mean_k3": 0.05,
    "seq_max_k2": 0.3,
    "seq_max_k3": "0.3",
}
WEIGHTS: list[dict[str, Any]] = [
    {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
    for level, threshold, normalize in itertools.product(("token", "sequence"), (2.0, "0.5_2.0"), (False, True))
]
CONFIGS: list[dict[str, Any]] = [
    {},
    *WEIGHTS,
    *({"rollout_rs": option, "rollout_rs_threshold": threshold} for option, threshold in REJECTIONS.items()),
    WEIGHTS[0] | {"rollout_rs": "token_k1,seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "0.6_1.5,0.05,0.5"},
    WEIGHTS[6] | {"rollout_rs": "seq_sum_k1,token_k3", "rollout_rs_threshold": 2},
]


def name_of(config: dict[str, Any]) -> str:
    return " ".join(str(value) for value in config.values()) or "metrics"


def batch(seed: int = 0, rows: int = 16, width: int = 40, scale: float = 0.3) -> Batch:
    """pi_old, mu in float64 and the mask, with holes; every row has a token, and padding is a large number."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    mu = old + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask &= torch.rand(rows, width, generator=generator) < 0.9
    mask[:, 0] = True
    return old.masked_fill(~mask, -50.0), mu.masked_fill(~mask, 3.0), mask


def weights_of(answer: Answer) -> Tensor | None:
    return None if answer[0] is None else answer[0].batch["rollout_is_weights"]


def metric(answer: Answer, name: str) -> float:
    return answer[2][f"rollout_corr/{name}"]


def assert_same(got: Answer, expected: Answer, *, rtol: float, atol: float) -> None:
    ours, theirs = weights_of(got), weights_of(expected)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert got[1].dtype == expected[1].dtype
    assert torch.equal(got[1], expected[1])
    assert set(got[2]) == set(expected[2])
    for name, value in got[2].items():
        # A standard deviation has half the digits of the variance that it is the root of.
        power = 2 if name.endswith("_std") else 1
        assert value**power == pytest.approx(expected[2][name] ** power, rel=rtol, abs=atol), name


@pytest.mark.slow
@settings(max_examples=at_most(60))
@given(
    st.sampled_from(WEIGHTS),
    st.lists(st.sampled_from(sorted(REJECTIONS)), min_size=1, max_size=4, unique=True),
    st.integers(0, 2**20),
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([0.01, 0.3, 1.0]),
)
def test_agrees_with_verl_on_drawn_batches(
    weight: dict[str, Any], options: list[str], seed: int, rows: int, width: int, scale: float
) -> None:
    config = weight | {
        "rollout_rs": ",".join(options),
        "rollout_rs_threshold": ",".join(str(REJECTIONS[option]) for option in options),
    }
    old, mu, mask = batch(seed, rows, width, scale)
    try:
        expected = verl_helper(old, mu, mask, **config)
    except ZeroDivisionError:  # verl's effective sample size where every weight is out of bounds
        return
    # verl adds 1e-8 to the mean weight that it divides by, which is felt where weights are small.
    size = "rollout_corr/rollout_is_eff_sample_size"
    expected[2][size] /= (1 + 1e-8 / metric(expected, "rollout_is_mean")) ** 2
    assert_same(verl_rollout_correction(old, mu, mask, **config), expected, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("config", each_nth_by_default(3, CONFIGS), ids=name_of)
def test_padding_and_rows_without_a_token_change_nothing(config: dict[str, Any]) -> None:
    old, mu, mask = batch()
    expected = verl_rollout_correction(old, mu, mask, **config)
    for pair in ((old.masked_fill(~mask, math.nan), mu), (old, mu.masked_fill(~mask, -math.inf))):
        assert_same(verl_rollout_correction(*pair, mask, **config), expected, rtol=0, atol=0)
    empty = torch.zeros(3, mask.shape[1], dtype=torch.bool)
    longer, longer_mu = (torch.cat([tensor, tensor[:3]]) for tensor in (old, mu))
    got = verl_rollout_correction(longer, longer_mu, torch.cat([mask, empty]), **config)
    assert got[2] == pytest.approx(expected[2], rel=1e-12, abs=1e-15)
    assert torch.equal(got[1][:-3], expected[1])
    assert not got[1][-3:].any()


@pytest.mark.parametrize("config", each_nth_by_default(3, CONFIGS), ids=name_of)
def test_decisions_are_those_of_the_stages(config: dict[str, Any]) -> None:
    old, mu, mask = batch()
    weight, kept, _ = verl_rollout_correction(old.float(), mu.float(), mask, **config)
    spec = CorrectionSpec.from_verl(config)
    stage = rollout_stage(spec, old_log_prob=old.float(), rollout_log_prob=mu.float(), response_mask=mask)
    step = step_stage(spec, stage, log_prob=old.float(), advantages=torch.ones_like(mu).float())
    applied = kept * (1.0 if weight is None else weight.batch["rollout_is_weights"])
    torch.testing.assert_close(applied, step.weight * step.keep, rtol=1e-6, atol=0)


# Where verl's figure is not right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_small_drifts_keep_their_digits(scale: float) -> None:
    """The result is compared with sums by math.fsum over the same float32 log-probs."""
    old, mu, mask = batch(7, rows=8, width=64, scale=scale)
    old, mu = old.float(), mu.float()
    config: dict[str, Any] = {"rollout_is": "token", "rollout_rs": "token_k3", "rollout_rs_threshold": 1.0}
    got = verl_rollout_correction(old, mu, mask, **config)
    drift = [
        d for d, valid in zip((old - mu).double().flatten().tolist(), mask.flatten().tolist(), strict=True) if valid
    ]
    n = len(drift)
    mean = math.fsum(math.expm1(d) for d in drift) / n
    expected = {
        "rollout_is_std": math.sqrt(math.fsum((math.expm1(d) - mean) ** 2 for d in drift) / n),
        # rho - 1 - log rho by its series, d^2/2 + d^3/6 + d^4/24
        "k3_kl": math.fsum(d * d / 2 + d**3 / 6 + d**4 / 24 for d in drift) / n,
        "chi2_token": math.fsum(math.expm1(2 * d) for d in drift) / n,
        "kl": -math.fsum(drift) / n,
    }
    for name, value in expected.items():
        assert metric(got, name) == pytest.approx(value, rel=1e-6 if scale > 1e-5 else 1e-3), name
    assert metric(got, "rollout_rs_token_k3_min") >= 0
    theirs = verl_helper(old, mu, mask, **config)
    assert metric(theirs, "rollout_rs_token_k3_min") < 0
    if scale < 1e-3:
        assert abs(metric(theirs, "k3_kl") / expected["k3_kl"] - 1) > 0.05
        assert abs(metric(theirs, "rollout_is_std") / expected["rollout_is_std"] - 1) > 0.5


def test_effective_sample_size_is_a_share() -> None:
    """Equal weights leave the whole sample, however small they are; zero weights leave nothing."""
    mu, mask = torch.full((2, 3), -1.0), torch.ones(2, 3, dtype=torch.int64)
    tiny = verl_rollout_correction(mu - 19, mu, mask, rollout_is="token")
    assert metric(tiny, "rollout_is_eff_sample_size") == pytest.approx(1.0)
    assert metric(verl_helper(mu - 19, mu, mask, rollout_is="token"), "rollout_is_eff_sample_size") > 7
    none_left = verl_rollout_correction(mu - 3, mu, mask, rollout_is="token", rollout_is_threshold="0.5_2.0")
    assert metric(none_left, "rollout_is_eff_sample_size") == 0.0
    assert metric(none_left, "rollout_is_oob_ratio") == 1.0
    with pytest.raises(ZeroDivisionError):
        verl_helper(mu - 3, mu, mask, rollout_is="token", rollout_is_threshold="0.5_2.0")


def test_log_ratios_are_summed_before_they_are_clamped() -> None:
    """+30 and -24 add up to 6 nats, outside [0.5, 2]. Clamped first, they would add up to 0."""
    old, mu, mask = torch.tensor([[-1.0, -25.0]]), torch.tensor([[-31.0, -1.0]]), torch.ones(1, 2)
    config: dict[str, Any] = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
    assert verl_rollout_correction(old, mu, mask, **config)[1].tolist() == [[0.0, 0.0]]
    assert verl_helper(old, mu, mask, **config)[1].tolist() == [[1.0, 1.0]]


# The rest of the interface -------------------------------------------------------------------------------------------


def test_weights_are_normalised_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights 1 and 2 here have the mean 1.5; with as many tokens of mean 2.5 elsewhere, the mean is 2."""
    old, mu = torch.tensor([[0.0, math.log(2.0)]]) - 3, torch.full((1, 2), -3.0)
    config: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": 9.0, "rollout_is_batch_normalize": True}
    alone = weights_of(verl_rollout_correction(old, mu, torch.ones(1, 2), **config))
    assert alone[0].tolist() == pytest.approx([1 / 1.5, 2 / 1.5])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda parts: parts.add_(torch.tensor([5.0, 2.0])))
    answer = verl_rollout_correction(old, mu, torch.ones(1, 2), **config)
    assert metric(answer, "rollout_is_batch_norm_factor") == pytest.approx(2.0)
    weights = weights_of(answer)
    assert weights[0].tolist() == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rollout_is": "row"}, "rollout_is=row: no such choice. Set one of null, token, sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "rollout_is_threshold=null: verl ignores a weight"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold='2_1': nothing lies between"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, "rollout_rs=token_k4: 'token_k4' is unknown"),
        ({"rollout_rs": "token_k2"}, "rollout_rs_threshold=null with rollout_rs=token_k2"),
    ],
)
def test_malformed_arguments_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        verl_rollout_correction(*batch(), **config)
    assert message in str(error.value)


def test_tensors_that_cannot_be_are_refused() -> None:
    old, mu, mask = batch()
    with pytest.raises(ValueError, match="one shape"):
        verl_rollout_correction(old, mu[:, 1:], mask)
    with pytest.raises(ValueError, match="no token"):
        verl_rollout_correction(old, mu, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="no token"):
        verl_rollout_correction(old[:0], mu[:0], mask[:0])
    with pytest.raises(ValueError, match="no token"):
        verl_rollout_correction(torch.full_like(old, math.nan), mu, mask)
