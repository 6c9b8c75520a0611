"""Log-ratios: three policies, three ratios, and nothing of a padded position in any of them."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.correction.ratios import (
    clamp_and_exp,
    compute_divergence,
    compute_excess,
    compute_log_ratio,
    find_valid_tokens,
    promote_weight_dtype,
)
from tests.support.corrections import opsm, run, spec, tensor, values

NAN, INF = math.nan, math.inf


def test_valid_tokens_are_in_the_mask_and_finite() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    old = tensor([[-1.0, NAN, -1.0, -1.0, -1.0]])
    mu = tensor([[-1.0, -1.0, -INF, -1.0, -1.0]])
    assert find_valid_tokens(mask, old, mu).tolist() == [[True, False, False, True, False]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_be_of_any_type(kind: torch.dtype) -> None:
    assert find_valid_tokens(torch.tensor([[1, 0]]).to(kind), tensor([[-1.0, -1.0]])).tolist() == [[True, False]]


def test_log_ratio_by_hand() -> None:
    # log(pi_old / mu) = log pi_old - log mu: -1 - (-1.5) = 0.5, and -2 - (-1) = -1; padding gives 0.
    result = compute_log_ratio(
        tensor([[-1.0, -2.0, NAN]]), tensor([[-1.5, -1.0, INF]]), torch.tensor([[1, 1, 0]]).bool()
    )
    assert result.tolist() == [[0.5, -1.0, 0.0]]


@pytest.mark.parametrize(
    ("numerator", "denominator", "weight"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.bfloat16, torch.float64, torch.float64),
    ],
)
def test_log_ratio_is_float64_and_weights_float32_or_wider(
    numerator: torch.dtype, denominator: torch.dtype, weight: torch.dtype
) -> None:
    """In bfloat16 itself -7 - (-7.03125) = 0.03125 has no error, but a sum of 300 of them stops growing at 8."""
    a, b = torch.full((1, 300), -7.0, dtype=numerator), torch.full((1, 300), -7.03125, dtype=denominator)
    result = compute_log_ratio(a, b, torch.ones(1, 300, dtype=torch.bool))
    assert result.dtype is torch.float64
    assert result.sum().item() == pytest.approx(300 * 0.03125, abs=1e-9)
    assert promote_weight_dtype(a, b) is weight


def test_log_ratio_of_policies_far_apart_is_not_rounded() -> None:
    """-1 - (-2^-30) has 30 binary digits, more than float32 holds: 32768 of them would be off by 3e-5 together."""
    a, b = torch.full((1, 1), -1.0), torch.full((1, 1), -(2.0**-30))
    assert compute_log_ratio(a, b, torch.ones(1, 1, dtype=torch.bool)).item() == -1.0 + 2.0**-30


def test_log_ratio_is_detached() -> None:
    a = torch.zeros(1, 1, requires_grad=True)
    assert not compute_log_ratio(a, a + 1, torch.ones(1, 1, dtype=torch.bool)).requires_grad


def test_exp_is_clamped_at_20_nats() -> None:
    # e^20 = 485 165 195.4 and e^-20 = 2.0612e-9; inside the clamp nothing changes: e^0.5 = 1.6487213.
    result = clamp_and_exp(tensor([-INF, -1000.0, 0.0, 0.5, 1000.0, INF], torch.float64)).tolist()
    assert result == pytest.approx([2.0611536e-9, 2.0611536e-9, 1.0, 1.6487213, 4.851652e8, 4.851652e8], rel=1e-7)


def test_exp_in_float32_is_finite() -> None:
    assert torch.isfinite(clamp_and_exp(tensor([-1e30, 1e30]))).all()


def test_the_clamp_is_at_the_exp_only() -> None:
    """A row of 100 nats against 1 token of -99: the mean counts all of it. Clamped, it would be (20 - 20) / 2."""
    step = run(spec(opsm=opsm(0.4)), mu=[[0.0, 0.0]], old=[[0.0, 0.0]], pi=[[99.0, -100.0]], advantages=-1)
    # (99 - 100) / 2 = -0.5 < -0.4
    assert not step.keep.any()


def test_divergences_by_hand() -> None:
    """r = 2: k1 = -ln 2, k2 = (ln 2)^2 / 2, k3 = 2 - 1 - ln 2, tv = 1/2. r = 1/2: ln 2, the same, ln 2 - 1/2, 1/4."""
    log_r = tensor([math.log(2), -math.log(2), 0.0], torch.float64)
    ln2 = 0.6931471805599453
    assert compute_divergence("k1", log_r).tolist() == pytest.approx([-ln2, ln2, 0.0], abs=1e-15)
    assert compute_divergence("k2", log_r).tolist() == pytest.approx(
        [0.2402265069591007, 0.2402265069591007, 0.0], abs=1e-15
    )
    assert compute_divergence("k3", log_r).tolist() == pytest.approx([1 - ln2, ln2 - 0.5, 0.0], abs=1e-15)
    assert compute_divergence("tv", log_r).tolist() == pytest.approx([0.5, 0.25, 0.0], abs=1e-15)


def test_divergences_of_nearly_equal_policies_keep_their_digits() -> None:
    """k3 = x^2/2 + x^3/6 + ..., where r - 1 - log r written out in float32 gives 0 or 1e-7, for x = +-1e-4 and 1e-6."""
    x = tensor([1e-4, -1e-4, 1e-6])
    exact = [v * v / 2 + v**3 / 6 + v**4 / 24 for v in x.double().tolist()]
    assert compute_divergence("k3", x).tolist() == pytest.approx(exact, rel=1e-8, abs=0.0)
    assert compute_excess(x).tolist() == pytest.approx(
        [v + v * v / 2 + v**3 / 6 for v in x.double().tolist()], rel=1e-12
    )


def test_divergences_are_clamped_at_the_exp_only() -> None:
    """1000 nats: k1 and k2 count all of them; of k3 = r - 1 - log r the ratio is e^20 or e^-20, the log is whole."""
    x = tensor([1000.0, -1000.0])
    assert compute_divergence("k1", x).tolist() == [-1000.0, 1000.0]
    assert compute_divergence("k2", x).tolist() == [500_000.0, 500_000.0]
    assert compute_divergence("k3", x).tolist() == pytest.approx([math.exp(20) - 1001, math.exp(-20) + 999], rel=1e-12)
    assert compute_divergence("tv", x).tolist() == pytest.approx([(math.exp(20) - 1) / 2, 0.5], rel=1e-8)


def test_an_unknown_divergence() -> None:
    with pytest.raises(ValueError, match="one of k1, k2, k3, tv"):
        compute_divergence("k4", torch.zeros(1))


def test_thousand_tokens_of_one_per_cent() -> None:
    """0.99^1000 = 4.317e-5 and 1.01^1000 = 20 959."""
    old = torch.tensor([[math.log(0.99)] * 1000, [math.log(1.01)] * 1000])
    weight = dict(level="sequence", kind="truncate", lower=None, upper=None)
    step = run(spec(weight), mu=torch.zeros(2, 1000), old=old)
    assert step.weight[:, 0].tolist() == pytest.approx([4.3171e-5, 20959.2], rel=1e-4)


def test_the_ppo_ratio_is_not_the_full_ratio() -> None:
    """At pi = pi_old PPO's own ratio clips nothing, the merged one pi/mu does.

    mu = -1.5, pi_old = pi = -1.0: pi/pi_old = 1, but pi/mu = e^0.5 = 1.649 > 1 + 0.2.
    """
    result = values(run(spec(), mu=[[-1.5, -1.5]], old=[[-1.0, -1.0]], pi=[[-1.0, -1.0]]))
    assert (result["ppo_ratio/min"], result["ppo_ratio/max"], result["ppo_ratio/std"]) == (1.0, 1.0, 0.0)
    assert result["full_ratio/min"] == result["full_ratio/max"] == pytest.approx(1.6487213, abs=1e-6)
    assert result["rollout_ratio/mean"] == pytest.approx(1.6487213, abs=1e-6)


def test_the_full_ratio_is_the_product_of_the_other_two() -> None:
    # pi_old/mu = e^(-1 + 1.25) = e^0.25, pi/pi_old = e^(-0.5 + 1) = e^0.5; pi/mu = e^0.75 = 2.1170
    result = values(run(spec(), mu=[[-1.25]], old=[[-1.0]], pi=[[-0.5]]))
    assert result["rollout_ratio/mean"] == pytest.approx(1.2840254, abs=1e-6)
    assert result["ppo_ratio/mean"] == pytest.approx(1.6487213, abs=1e-6)
    assert result["full_ratio/mean"] == pytest.approx(2.1170000, abs=1e-6)
