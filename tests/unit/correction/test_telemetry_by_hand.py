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
from tests.support.corrections import GSM, TIS, band, opsm, run, spec, values
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


def test_sequence_ratios_are_of_rows() -> None:
    """Rows of 1 token at 2 and 2 tokens at 1, 1, and one of none: products 2 and 1. Mean 1.5, ESS 9 / (2 x 5)."""
    result = values(
        run(
            spec(),
            mu=torch.zeros(3, 2),
            old=[[math.log(2), 9.0], [0.0, 0.0], [9.0, 9.0]],
            mask=[[1, 0], [1, 1], [0, 0]],
        )
    )
    assert result["rollout_ratio_sequence/mean"] == pytest.approx(1.5)
    assert result["rollout_ratio_sequence/std"] == pytest.approx(0.5)
    assert result["rollout_ratio_sequence/ess"] == pytest.approx(0.9)
    assert result["rollout_ratio_sequence/chi2"] == pytest.approx(1.5)
    assert (result["rollout_ratio_sequence/min"], result["rollout_ratio_sequence/max"]) == (1.0, pytest.approx(2.0))
    assert result["rollout_ratio/mean"] == pytest.approx(4 / 3)


def test_masked_shares_by_hand() -> None:
    """Rows of 3, 1 and 2 response tokens, one of them without mu; GSM drops the first row.

    Tokens: kept 0 + 1 + 1 of 6, so that 4 of 6 are masked, 3 of 6 by GSM. Rows: 2 of 3 kept, 1 of 3 dropped.
    The first two rows have a negative advantage: 1 of their 4 tokens is kept, 1 of their 2 rows.
    """
    step = run(
        spec(gsm=GSM, opsm=opsm(0.1)),
        mu=[[0.0] * 3, [0.0] * 3, [0.0, NAN, 0.0]],
        old=[[1.0] * 3, [0.0] * 3, [0.0] * 3],
        mask=[[1, 1, 1], [1, 0, 0], [1, 1, 0]],
        advantages=[-1.0, -1.0, 1.0],
    )
    result = values(step)
    assert result["keep/token_share"] == pytest.approx(2 / 6)
    assert result["keep/token_mask_ratio"] == pytest.approx(4 / 6)
    assert result["keep/sequence_share"] == pytest.approx(2 / 3)
    assert result["keep/negative/token_share"] == pytest.approx(1 / 4)
    assert result["keep/negative/sequence_share"] == pytest.approx(1 / 2)
    assert result["keep/positive/token_share"] == pytest.approx(1 / 2)
    assert result["keep/positive/sequence_share"] == 1.0
    assert result["mask/gsm/masked_token_share"] == pytest.approx(3 / 6)
    assert result["mask/gsm/masked_sequence_share"] == pytest.approx(1 / 3)
    assert result["mask/gsm/negative/masked_token_share"] == pytest.approx(3 / 4)
    assert result["mask/gsm/negative/masked_sequence_share"] == pytest.approx(1 / 2)
    assert result["mask/gsm/positive/masked_token_share"] == 0.0
    assert result["mask/opsm/masked_token_share"] == 0.0
    assert result["mask/opsm/masked_sequence_share"] == 0.0


def test_a_rejecting_weight_by_hand() -> None:
    """Ratios 1, 1, 4 and 1 under reject above 2: applied 1, 1, 0, 1. Mean 3/4, ESS 9 / (4 x 3), chi2 3/4 - 1."""
    step = run(spec(TIS | {"kind": "reject"}), mu=torch.zeros(2, 2), old=[[0.0, 0.0], [math.log(4), 0.0]])
    result = values(step)
    assert result["weight/mean"] == pytest.approx(0.75)
    assert result["weight/ess"] == pytest.approx(0.75)
    assert result["weight/chi2"] == pytest.approx(-0.25)
    assert (result["weight/min"], result["weight/max"]) == (0.0, 1.0)
    assert result["raw_weight/max"] == pytest.approx(4.0)
    assert result["weight/masked_token_share"] == 0.25
    assert result["weight/masked_sequence_share"] == 0.0
    assert result["weight/truncated_share"] == 0.25


def test_padding_is_not_truncated() -> None:
    """Ratios 1/4, 1 and 4 in [1/2, 2] beside three positions of padding, at which the raw weight is 0."""
    correction = spec(TIS | {"kind": "clip", "lower": 0.5})
    old = [[math.log(0.25), 0.0, math.log(4), 0.0, 0.0, 0.0]]
    assert values(run(correction, mu=torch.zeros(1, 6), old=old, mask=[[1, 1, 1, 0, 0, 0]]))[
        "weight/truncated_share"
    ] == pytest.approx(2 / 3)


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


def test_both_reference_masks_by_length() -> None:
    """Whatever is configured, here nothing: 1.001^2000 = 7.38 leaves the product's band alone, 1.02^10 the other's."""
    old = torch.full((2, 2000), math.log(1.001))
    old[1] = math.log(1.02)
    mask = torch.ones(2, 2000)
    mask[1, 10:] = 0
    result = values(run(spec(), mu=torch.zeros(2, 2000), old=old, mask=mask))
    assert (result["length/le4096/geometric_keep_share"], result["length/le4096/product_keep_share"]) == (1.0, 0.0)
    assert (result["length/le16/geometric_keep_share"], result["length/le16/product_keep_share"]) == (0.0, 1.0)
    assert math.isnan(result["length/le64/product_keep_share"])


@pytest.mark.parametrize("bound", [0.99, 1.01, 0.5, 2.0])
def test_a_reference_mask_is_the_mask_also_at_its_bound(bound: float) -> None:
    """A single token at the bound and next to it on either side, in the float32 that masks compare in."""
    at = torch.tensor(math.log(bound))
    old = torch.stack([torch.nextafter(at, at - 1), at, torch.nextafter(at, at + 1)])[:, None]
    for one in old:
        rows = dict(mu=torch.zeros(1, 1), old=one[None])
        for aggregate, low, high in (("geometric", 0.99, 1.01), ("product", 0.5, 2.0)):
            result = values(run(spec(m=band(low, high, aggregate=aggregate)), **rows))
            assert result[f"length/le16/{aggregate}_keep_share"] == result["keep/sequence_share"]


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


def test_staleness_by_token_by_hand() -> None:
    """Ages 4, 4 and 1 in the first row, 0 in the second, whose padding says 9: mean 9 / 5."""
    result = by_age(torch.tensor([[4, 4, 1], [0, 0, 9]]))
    assert (result["mean"], result["max"]) == (pytest.approx(9 / 5), 4.0)
    assert [result[f"{group}/token_count"] for group in ("is0", "is1", "is2", "ge3")] == [2.0, 1.0, 0.0, 2.0]
    assert result["is1/kl_k3"] == pytest.approx(1 - math.log(2))
    assert (result["is0/kl_k3"], result["ge3/kl_k3"]) == (0.0, 0.0)
    assert [result[f"{group}/keep_token_share"] for group in ("is0", "is1", "ge3")] == [1.0, 0.0, 1.0]
    assert math.isnan(result["is2/kl_k3"])
    assert math.isnan(result["is2/keep_token_share"])


def test_rows_of_one_version_show_the_same_by_token_and_by_row() -> None:
    """The mean alone is over tokens, 2 x 3 and 1 x 2 of 5, in the place of rows."""
    by_row, by_token = by_age(torch.tensor([2, 1])), by_age(torch.tensor([[2, 2, 2], [1, 1, 1]]))
    assert (by_row.pop("mean"), by_token.pop("mean")) == (1.5, pytest.approx(8 / 5))
    assert by_token == pytest.approx(by_row, nan_ok=True)


def test_staleness_is_one_number_a_row_or_a_token() -> None:
    with pytest.raises(ValueError, match=r"staleness.*\(3,\)"):
        by_age(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"staleness.*\(2, 2\)"):
        by_age(torch.zeros(2, 2))


def test_statistics_see_the_original_mask() -> None:
    """A dropped row stays in the statistics; else the mismatch would look small where masks act."""
    rows = dict(mu=torch.zeros(2, 1), old=[[1.0], [0.0]])
    masked, plain = values(run(spec(gsm=GSM), **rows)), values(run(spec(), **rows))
    assert masked["keep/sequence_share"] == 0.5
    of_all = {name: value for name, value in plain.items() if "keep_" not in name and "keep/" not in name}
    assert {name: masked[name] for name in of_all} == pytest.approx(of_all, nan_ok=True, abs=0, rel=0)


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
