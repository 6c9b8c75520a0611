"""What the two stages report, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.correction import (
    CorrectionSpec,
    rollout_stage,
    step_stage,
)
from tests.support.corrections import GSM, band, run, spec, values
from tests.support.telemetry_cases import NAN


def test_the_mismatch_by_hand() -> None:
    """log rho = 0.5 and -0.1: mean 0.2, mean size 0.3, deviation 0.3; the row's product is e^0.4.

    KL(mu || pi_old): k1 = -0.2; k3 = mean of e^0.5 - 1 - 0.5 = 0.14872 and e^-0.1 - 1 + 0.1 = 0.0048374: 0.0767793.
    """
    result = values(run(spec(), mu=[[-1.0, -1.0]], old=[[-0.5, -1.1]], pi=[[-2.0, -2.0]]))
    assert result["log_prob_difference/mean"] == pytest.approx(0.2, abs=1e-7)
    assert result["log_prob_difference/abs_mean"] == pytest.approx(0.3, abs=1e-7)
    assert result["log_prob_difference/std"] == pytest.approx(0.3, abs=1e-7)
    assert result["kl/k1"] == pytest.approx(-0.2, abs=1e-7)
    assert result["kl/k3"] == pytest.approx(0.0767793, abs=1e-6)
    assert result["rollout_ratio/min"] == pytest.approx(math.exp(-0.1))
    assert result["rollout_ratio/max"] == pytest.approx(math.exp(0.5))
    assert result["rollout_ratio/chi2"] == pytest.approx((math.exp(1.0) + math.exp(-0.2)) / 2 - 1, rel=1e-6)
    assert result["rollout_ratio_sequence/mean"] == pytest.approx(math.exp(0.4), rel=1e-6)
    assert result["rollout_ratio_sequence/ess"] == pytest.approx(1.0)
    assert result["perplexity/rollout"] == pytest.approx(math.exp(1.0), rel=1e-6)
    assert result["perplexity/old"] == pytest.approx(math.exp(0.8), rel=1e-6)
    assert result["perplexity/current"] == pytest.approx(math.exp(2.0), rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(1, "le16"), (16, "le16"), (17, "le64"), (64, "le64"), (65, "le256"), (257, "le1024"), (4097, "gt4096")],
)
def test_the_edges_of_length_buckets(tokens: int, bucket: str) -> None:
    ones = torch.ones(1, tokens)
    result = values(run(spec(), mu=ones, old=ones))
    found = {name for name, value in result.items() if name.endswith("/sequences") and value == 1.0}
    assert found == {f"length/{bucket}/sequences"}
    assert result[f"length/{bucket}/keep_sequence_share"] == 1.0


def test_turns_by_hand() -> None:
    """Turns 3, 3 | 7 and 8 | 8: first are the row's least. GSM by turn drops the 7, whose ratio is 2."""
    correction = spec(gsm=GSM | {"level": "turn"})
    stage = rollout_stage(
        correction,
        old_log_prob=torch.tensor([[0.0, 0.0, 5.0, math.log(2)], [0.0, 0.0, 5.0, 5.0]]),
        rollout_log_prob=torch.zeros(2, 4),
        response_mask=torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]]),
        segment_ids=torch.tensor([[3, 3, 1, 7], [8, 8, 1, 1]]),
    )
    result = values(step_stage(correction, stage, log_prob=torch.zeros(2, 4), advantages=torch.ones(2, 4)))
    assert (result["turn/first/token_count"], result["turn/post_tool/token_count"]) == (4.0, 1.0)
    assert (result["turn/first/kl_k3"], result["turn/post_tool/kl_k3"]) == (0.0, pytest.approx(1 - math.log(2)))
    assert (result["turn/first/rollout_ratio/mean"], result["turn/post_tool/rollout_ratio/mean"]) == (
        1.0,
        pytest.approx(2.0),
    )
    assert result["turn/first/rollout_ratio/std"] == 0.0
    assert (result["turn/first/keep_token_share"], result["turn/post_tool/keep_token_share"]) == (1.0, 0.0)


def test_staleness_by_hand() -> None:
    """Rows of 2, 1, 1 and no tokens at staleness 0, 3, 5 and 9: mean 8/3, the last one is not there."""
    correction = spec(gsm=GSM)
    stage = rollout_stage(
        correction,
        old_log_prob=torch.tensor([[0.0, 0.0], [math.log(2), 0.0], [0.0, 0.0], [0.0, 0.0]]),
        rollout_log_prob=torch.zeros(4, 2),
        response_mask=torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]]),
        staleness=torch.tensor([0, 3, 5, 9]),
    )
    result = values(step_stage(correction, stage, log_prob=torch.zeros(4, 2), advantages=torch.ones(4, 2)))
    assert result["staleness/mean"] == pytest.approx(8 / 3)
    assert result["staleness/max"] == 5.0
    assert [result[f"staleness/{group}/token_count"] for group in ("is0", "is1", "is2", "ge3")] == [2.0, 0.0, 0.0, 2.0]
    assert result["staleness/is0/kl_k3"] == 0.0
    assert result["staleness/ge3/kl_k3"] == pytest.approx((1 - math.log(2)) / 2)
    assert result["staleness/ge3/keep_token_share"] == 0.5
    assert math.isnan(result["staleness/is1/kl_k3"])


def by_age(staleness: torch.Tensor) -> dict[str, float]:
    """Rows of 3 and 2 tokens; the ratio is 2 at the third token of the first, which a token mask rejects."""
    correction = spec(tm=band(0.5, 1.5, level="token", aggregate="product"))
    stage = rollout_stage(
        correction,
        old_log_prob=torch.tensor([[0.0, 0.0, math.log(2)], [0.0, 0.0, 9.0]]),
        rollout_log_prob=torch.zeros(2, 3),
        response_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        staleness=staleness,
    )
    result = values(step_stage(correction, stage, log_prob=torch.zeros(2, 3), advantages=torch.ones(2, 3)))
    return {name.removeprefix("staleness/"): value for name, value in result.items() if name.startswith("staleness/")}


def test_staleness_is_one_number_a_row_or_a_token() -> None:
    with pytest.raises(ValueError, match=r"staleness.*\(3,\)"):
        by_age(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"staleness.*\(2, 2\)"):
        by_age(torch.zeros(2, 2))


def test_a_mask_that_does_not_read_mu_counts_tokens_without_it() -> None:
    """pi / pi_old is e at both tokens, mu is known at the first: both rejected, both counted, also by sign."""
    narrow = band(0.9, 1.1, ratio="ppo", level="token", aggregate="product")
    result = values(
        run(spec(narrow=narrow), mu=[[0.0, NAN]], old=[[0.0, 0.0]], pi=[[1.0, 1.0]], advantages=[[-1.0, 3.0]])
    )
    assert result["mask/narrow/masked_token_share"] == result["mask/narrow/masked_sequence_share"] == 1.0
    assert result["mask/narrow/positive/masked_token_share"] == 1.0
    assert result["keep/token_share"] == 0.0
    unknown = values(run(spec(narrow=narrow), mu=[[NAN, NAN]], old=[[0.0, 0.0]], pi=[[1.0, 0.0]]))
    assert unknown["mask/narrow/masked_token_share"] == 0.5
    assert unknown["mask/narrow/masked_sequence_share"] == 0.0


def test_a_penalty_on_pi_old_counts_tokens_without_mu() -> None:
    """log pi / pi_old of 1 and 3: (1 + 9) / 2."""
    penalised = CorrectionSpec.from_mapping({"penalty": {"ratio": "ppo", "coefficient": 0.1}})
    result = values(run(penalised, mu=[[0.0, NAN]], old=[[0.0, 0.0]], pi=[[1.0, 3.0]]))
    assert result["penalty/mean"] == pytest.approx(5.0)
