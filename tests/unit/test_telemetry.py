"""What the two stages report: by hand, against a reference read token by token, and in any split of the rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corrections import GSM, TIS, band, on_host, opsm, run, spec, values
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch import Tensor

from recipe.offpolicy.correction import (
    BatchConstants,
    CorrectionSpec,
    Reduction,
    RolloutStage,
    StepStage,
    batch_constants,
    rollout_stage,
    step_stage,
)
from recipe.offpolicy.correction.catalogue import ENTRIES, SHADOW_ENTRIES, markdown
from recipe.offpolicy.correction.statistics import merge_all
from recipe.offpolicy.shadow import shadow_statistics

NAN = math.nan
REJECT = TIS | {"kind": "reject", "lower": 0.7, "upper": 1.4}
STACK = dict(gsm=GSM, opsm=opsm(0.05), outlier=band(0.5, 2.0, aggregate="any"), tokens=band(0.8, 1.3, level="token"))
CORRECTIONS: dict[str, CorrectionSpec] = {
    "none": spec(),
    "token": spec(TIS | {"upper": 1.1}, **STACK),
    "reject": spec(REJECT | {"level": "turn"}, **STACK),
    "full": spec(TIS | {"level": "sequence", "ratio": "full", "kind": "clip", "lower": 0.9, "upper": 1.2}),
    "geometric": spec(TIS | {"level": "version", "aggregate": "geometric", "upper": 1.05}, opsm=opsm(0.02, "ppo")),
    "normalized": spec(REJECT | {"normalize": True}, m2po=dict(
        ratio="rollout", level="token", aggregate="second_moment", budget=0.02, when="any")),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Rows of tensors; a slice of rows is a micro-batch."""

    mu: Tensor
    old: Tensor
    pi: Tensor
    mask: Tensor
    advantages: Tensor
    segments: Tensor
    versions: Tensor
    staleness: Tensor

    def __getitem__(self, rows: Any) -> Batch:
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))


def random_batch(seed: int, rows: int = 12, width: int = 90, dtype: torch.dtype = torch.float32) -> Batch:
    """Rows of 0 to ``width`` tokens, with gaps, noise of any size, tokens without mu, and a row of nothing else."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    noise = 10 ** (-3 * uniform(rows, 1))
    mu = -3 * uniform(rows, width)
    old = mu + noise * (uniform(rows, width) - 0.5)
    pi = old + noise * (uniform(rows, width) - 0.5)
    segments = torch.arange(width).div(1 + uniform(rows, 1) * width, rounding_mode="floor").long().expand(rows, width)
    mask = (torch.arange(width) < (width + 1) * uniform(rows, 1)) & (uniform(rows, width) < 0.9)
    mask[: rows // 12] = False
    mu[uniform(rows, width) < 0.01] = NAN
    mu[rows // 12] = NAN
    return Batch(
        mu=mu.to(dtype),
        old=old.to(dtype),
        pi=pi.to(dtype),
        mask=mask,
        advantages=((uniform(rows, 1) * 3).floor() - 1).expand(rows, width),
        segments=segments + 5,
        versions=(3 * uniform(rows, width)).long(),
        staleness=(5 * uniform(rows)).long(),
    )


def stages(
    correction: CorrectionSpec, batch: Batch, constants: BatchConstants | None = None, **options: Any
) -> tuple[RolloutStage, StepStage]:
    stage = rollout_stage(
        correction,
        old_log_prob=batch.old,
        rollout_log_prob=batch.mu,
        response_mask=batch.mask,
        **dict(
            segment_ids=batch.segments,
            versions=batch.versions,
            staleness=batch.staleness,
            constants=constants,
        )
        | options,
    )
    return stage, step_stage(correction, stage, log_prob=batch.pi, advantages=batch.advantages)


# By hand ----------------------------------------------------------------------------------------------------


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


def test_staleness_is_one_number_a_row() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"staleness.*\(2, 3\)"):
        rollout_stage(spec(), old_log_prob=ones, rollout_log_prob=ones, response_mask=ones, staleness=ones)


def test_statistics_see_the_original_mask() -> None:
    """A dropped row stays in the statistics; else the mismatch would look small where masks act."""
    rows = dict(mu=torch.zeros(2, 1), old=[[1.0], [0.0]])
    masked, plain = values(run(spec(gsm=GSM), **rows)), values(run(spec(), **rows))
    assert masked["keep/sequence_share"] == 0.5
    of_all = {name: value for name, value in plain.items() if "keep_" not in name and "keep/" not in name}
    assert {name: masked[name] for name in of_all} == pytest.approx(of_all, nan_ok=True, abs=0, rel=0)


# Against a reference ----------------------------------------------------------------------------------------


def distribution(name: str, weights: list[float]) -> dict[str, float]:
    count = len(weights)
    if not count:
        return {f"{name}/{part}": NAN for part in ("mean", "std", "min", "max", "ess", "chi2")}
    mean = math.fsum(weights) / count
    square = math.fsum(w * w for w in weights)
    return {
        f"{name}/mean": mean,
        f"{name}/std": math.sqrt(math.fsum((w - mean) ** 2 for w in weights) / count),
        f"{name}/min": min(weights),
        f"{name}/max": max(weights),
        f"{name}/ess": math.fsum(weights) ** 2 / (count * square) if square else NAN,
        f"{name}/chi2": math.fsum((w - 1) ** 2 + 2 * (w - 1) for w in weights) / count,
    }


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else NAN


def reference(batch: Batch, step: StepStage, correction: CorrectionSpec) -> dict[str, float]:
    """Every statistic but ``raw_weight``, token by token in float64, of weight, keep and rejections as decided."""
    mu, old, pi = (t.double().tolist() for t in (batch.mu, batch.old, batch.pi))
    mask, keep, advantages = batch.mask.tolist(), step.keep.tolist(), batch.advantages.tolist()
    rows = range(len(mask))
    response = [[t for t, on in enumerate(row) if on] for row in mask]
    valid = [[t for t in response[b] if math.isfinite(mu[b][t]) and math.isfinite(old[b][t])] for b in rows]
    tokens = [(b, t) for b in rows for t in valid[b]]
    log_rho = {(b, t): old[b][t] - mu[b][t] for b, t in tokens}
    sums = {b: math.fsum(log_rho[b, t] for t in valid[b]) for b in rows}
    dropped = {key: drop.tolist() for key, drop in step.rejected.items()}

    def k3(some: list[tuple[int, int]]) -> float:
        return mean([math.expm1(log_rho[token]) - log_rho[token] for token in some])

    def keep_token_share(some: list[tuple[int, int]]) -> float:
        return mean([float(keep[b][t]) for b, t in some])

    def keep_row_share(some: list[int]) -> float:
        return mean([float(any(keep[b])) for b in some])

    def tokens_of(some: Any, of: list[list[int]] = response) -> list[tuple[int, int]]:
        return [(b, t) for b in some for t in of[b]]

    result = distribution("rollout_ratio", [math.exp(log_rho[token]) for token in tokens])
    result |= distribution("ppo_ratio", [math.exp(pi[b][t] - old[b][t]) for b, t in tokens])
    result |= distribution("full_ratio", [math.exp(pi[b][t] - mu[b][t]) for b, t in tokens])
    result |= distribution("rollout_ratio_sequence", [math.exp(sums[b]) for b in rows if valid[b]])
    weight, rejected = step.weight.double().tolist(), dropped.get("weight")
    result |= distribution("weight", [0.0 if rejected and rejected[b][t] else weight[b][t] for b, t in tokens])
    logs = list(log_rho.values())
    result |= {
        "log_prob_difference/mean": mean(logs),
        "log_prob_difference/abs_mean": mean([abs(x) for x in logs]),
        "log_prob_difference/std": math.sqrt(mean([(x - mean(logs)) ** 2 for x in logs])),
        "kl/k1": -mean(logs),
        "kl/k3": k3(tokens),
        "perplexity/rollout": math.exp(-mean([mu[b][t] for b, t in tokens])),
        "perplexity/old": math.exp(-mean([old[b][t] for b, t in tokens])),
        "perplexity/current": math.exp(-mean([pi[b][t] for b, t in tokens])),
    }
    for name, policy in {"rollout_log_prob": mu, "old_log_prob": old, "log_prob": pi, "advantages": advantages}.items():
        result[f"nonfinite/{name}"] = sum(not math.isfinite(policy[b][t]) for b, t in tokens_of(rows))

    signs = {b: math.fsum(advantages[b][t] for t in valid[b]) for b in rows}
    by_sign = {"": rows, "positive/": [b for b in rows if signs[b] > 0], "negative/": [b for b in rows if signs[b] < 0]}
    result["keep/token_mask_ratio"] = 1 - keep_token_share(tokens_of(rows))
    for sign, some in by_sign.items():
        result[f"keep/{sign}token_share"] = keep_token_share(tokens_of(some))
        result[f"keep/{sign}sequence_share"] = keep_row_share([b for b in some if response[b]])
        for key, drop in dropped.items():
            name = f"{key.replace('masks.', 'mask/')}/{sign}"
            result[f"{name}masked_token_share"] = mean(
                [float(t in valid[b] and drop[b][t]) for b, t in tokens_of(some)]
            )
            result[f"{name}masked_sequence_share"] = mean(
                [float(all(drop[b][t] for t in valid[b])) for b in some if valid[b]]
            )
    edges = [("le16", 0, 16), ("le64", 16, 64), ("le256", 64, 256), ("le1024", 256, 1024), ("le4096", 1024, 4096)]
    for name, above, most in [*edges, ("gt4096", 4096, math.inf)]:
        some = [b for b in rows if above < len(valid[b]) <= most]
        result[f"length/{name}/sequences"] = len(some)
        result[f"length/{name}/keep_token_share"] = keep_token_share(tokens_of(some))
        result[f"length/{name}/keep_sequence_share"] = keep_row_share(some)
        result[f"length/{name}/geometric_keep_share"] = mean(
            [float(0.99 <= math.exp(sums[b] / len(valid[b])) <= 1.01) for b in some]
        )
        result[f"length/{name}/product_keep_share"] = mean([float(0.5 <= math.exp(sums[b]) <= 2) for b in some])
    segments = batch.segments.tolist()
    least = {b: min((segments[b][t] for t in response[b]), default=0) for b in rows}
    for name, first in {"first": True, "post_tool": False}.items():
        of_turn = [token for token in tokens if (segments[token[0]][token[1]] == least[token[0]]) == first]
        ratios = distribution("", [math.exp(log_rho[token]) for token in of_turn])
        result |= {
            f"turn/{name}/token_count": len(of_turn),
            f"turn/{name}/kl_k3": k3(of_turn),
            f"turn/{name}/rollout_ratio/mean": ratios["/mean"],
            f"turn/{name}/rollout_ratio/std": ratios["/std"],
            f"turn/{name}/keep_token_share": keep_token_share(
                [(b, t) for b, t in tokens_of(rows) if (segments[b][t] == least[b]) == first]
            ),
        }
    ages = batch.staleness.tolist()
    there = [ages[b] for b in rows if response[b]]
    result |= {"staleness/mean": mean(there), "staleness/max": max(there, default=NAN)}
    for name, inside in {"is0": [0], "is1": [1], "is2": [2], "ge3": range(3, 99)}.items():
        some = [b for b in rows if ages[b] in inside]
        result[f"staleness/{name}/token_count"] = len(tokens_of(some, valid))
        result[f"staleness/{name}/kl_k3"] = k3(tokens_of(some, valid))
        result[f"staleness/{name}/keep_token_share"] = keep_token_share(tokens_of(some))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_statistic_against_the_reference(name: str, dtype: torch.dtype) -> None:
    """To 1e-5 for log-probs in float32; 1e-9 beside it for means whose terms cancel."""
    correction, batch = CORRECTIONS[name], random_batch(7, rows=24, dtype=dtype)
    _, step = stages(correction, batch)
    result = values(step)
    expected = reference(batch, step, correction)
    others = {key for key in result if key.startswith("raw_weight/") or key == "weight/truncated_share"}
    assert set(result) - others == set(expected)
    tolerance = dict(rel=1e-5, abs=1e-9) if dtype is torch.float32 else dict(rel=1e-9, abs=1e-12)
    assert {key: result[key] for key in expected} == pytest.approx(expected, nan_ok=True, **tolerance)


@pytest.mark.parametrize("level", ["token", "sequence", "turn", "version"])
@pytest.mark.parametrize("ratio", ["rollout", "full"])
def test_a_raw_weight_is_the_applied_one_without_bounds(level: str, ratio: str) -> None:
    """The two are taken on different ways: the applied one in float32 by token, the raw one in float64 by unit."""
    batch = random_batch(3)
    _, step = stages(spec(TIS | {"level": level, "ratio": ratio, "upper": None}), batch)
    result = values(step)
    for part in ("mean", "std", "min", "max", "ess", "chi2"):
        assert result[f"raw_weight/{part}"] == pytest.approx(result[f"weight/{part}"], rel=1e-5)
    assert result["weight/truncated_share"] == 0.0


def test_a_raw_weight_is_before_bounds_and_the_mean() -> None:
    """Ratios 2 and 4 under truncation at 3: weights 2 and 3, divided by 2.5."""
    correction = spec(TIS | {"upper": 3.0, "normalize": True})
    result = values(run(correction, mu=[[0.0, 0.0]], old=[[math.log(2), math.log(4)]]))
    assert (result["raw_weight/mean"], result["raw_weight/max"]) == (pytest.approx(3.0), pytest.approx(4.0))
    assert (result["weight/mean"], result["weight/max"]) == (pytest.approx(1.0), pytest.approx(1.2))
    assert result["weight/truncated_share"] == 0.5


def test_chi2_near_1_in_float32() -> None:
    """Drift of 1e-5 a token up and down: chi2 = cosh(2e-5) - 1 = 2e-10, of which float32 ratios would show nothing."""
    sign = torch.tensor([[1.0, -1.0] * 512])
    result = values(run(spec(), mu=torch.zeros_like(sign), old=1e-5 * sign))
    expected = math.expm1(2e-5) + math.expm1(-2e-5)
    assert result["rollout_ratio/chi2"] == pytest.approx(expected / 2, rel=1e-5)
    assert result["rollout_ratio/std"] == pytest.approx(1e-5, rel=1e-5)
    assert result["kl/k3"] == pytest.approx(5e-11, rel=1e-5)


# Any split --------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    draw.sampled_from(sorted(CORRECTIONS)),
    draw.integers(0, 2**16),
    draw.lists(draw.integers(0, 12), max_size=4),
    draw.permutations(range(12)),
)
def test_any_split_of_the_rows_merges_to_the_whole(name: str, seed: int, cuts: list[int], order: list[int]) -> None:
    """Every key, over micro-batches and ranks of any size, in any order."""
    correction, batch = CORRECTIONS[name], random_batch(seed)
    constants = batch_constants(
        correction,
        old_log_prob=batch.old,
        rollout_log_prob=batch.mu,
        response_mask=batch.mask,
        segment_ids=batch.segments,
        versions=batch.versions,
    )
    _, whole = stages(correction, batch, constants)
    bounds = [0, *sorted(cuts), 12]
    parts = [order[low:high] for low, high in itertools.pairwise(bounds)]
    merged = merge_all(on_host(stages(correction, batch[part], constants)[1].statistics) for part in parts)
    assert {key: one.value() for key, one in merged.items()} == pytest.approx(
        values(whole), rel=1e-9, abs=1e-12, nan_ok=True
    )


@settings(max_examples=20)
@given(draw.integers(0, 2**16), draw.integers(0, 12))
def test_shadows_merge_to_the_whole(seed: int, cut: int) -> None:
    batch = random_batch(seed)
    shadows = {name: one for name, one in CORRECTIONS.items() if not one.is_none and not one.needs_constants}
    whole, one, two = (shadow(shadows, part) for part in (batch, batch[:cut], batch[cut:]))
    merged = merge_all((on_host(one), on_host(two)))
    assert {key: one.value() for key, one in merged.items()} == pytest.approx(
        {key: one.value() for key, one in whole.items()}, rel=1e-9, abs=1e-12, nan_ok=True
    )


def shadow(shadows: dict[str, CorrectionSpec], batch: Batch) -> Any:
    return shadow_statistics(
        shadows,
        old_log_prob=batch.old,
        rollout_log_prob=batch.mu,
        response_mask=batch.mask,
        log_prob=batch.pi,
        advantages=batch.advantages,
        segment_ids=batch.segments,
        versions=batch.versions,
        staleness=batch.staleness,
    )


# Names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRECTIONS)
def test_names_are_the_same_whatever_the_data(name: str) -> None:
    """Every rank and step must report the same keys; they become the logger's names."""
    batch = random_batch(1)
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    matrices = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "staleness"}
    no_length = replace(batch, **{name: matrix[:, :0] for name, matrix in matrices.items()})
    keys = [list(stages(CORRECTIONS[name], some)[1].statistics) for some in (batch, empty, batch[:0], no_length)]
    assert keys[1:] == keys[:1] * 3


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_statistic_of_nothing_is_nan_and_a_count_0(name: str) -> None:
    batch = random_batch(1)
    for statistics in (
        stages(CORRECTIONS[name], replace(batch, mask=torch.zeros_like(batch.mask)))[1].statistics,
        stages(CORRECTIONS[name], batch[:0])[1].statistics,
    ):
        for key, statistic in statistics.items():
            value = statistic.value()
            assert value == 0.0 if statistic.reduction is Reduction.SUM else math.isnan(value), key


def test_a_minimum_or_maximum_is_said_in_a_name_only_where_it_is_one() -> None:
    """verl chooses min and max by substring of the name."""
    for correction in CORRECTIONS.values():
        for name, statistic in stages(correction, random_batch(1))[1].statistics.items():
            extreme = statistic.reduction in (Reduction.MIN, Reduction.MAX)
            assert ("min" in name or "max" in name) == extreme, name


def test_the_catalogue_holds_every_key_and_no_other() -> None:
    """With its reduction."""
    emitted, shown = {}, {}
    for name, correction in CORRECTIONS.items():
        for key, statistic in stages(correction, random_batch(1))[1].statistics.items():
            for mask, _ in correction.masks:
                key = key.replace(f"mask/{mask}/", "mask/<name>/")
            emitted[key] = statistic.reduction
        if not correction.is_none:
            for key, statistic in shadow({name: correction}, random_batch(1)).items():
                shown[key.replace(f"shadow/{name}/", "shadow/<option>/")] = statistic.reduction
    assert emitted == dict(pair for entry in ENTRIES for pair in entry.expanded())
    assert shown == dict(pair for entry in SHADOW_ENTRIES for pair in entry.expanded())


def test_the_table_says_every_key_and_no_other() -> None:
    """The table of docs/metrics.md, read back: {a,b} groups, expanded."""
    said = [key for line in markdown().splitlines()[2:] for key in expanded(line.split("`")[1])]
    known = [key for entry in (*ENTRIES, *SHADOW_ENTRIES) for key, _ in entry.expanded()]
    assert sorted(said) == sorted(known)
    assert len(set(said)) == len(said)


def expanded(pattern: str) -> list[str]:
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inside, _, after = rest.partition("}")
    return [before + one + end for one in inside.split(",") for end in expanded(after)]


def test_the_documentation_has_the_table() -> None:
    """To write it anew: python -c 'from recipe.offpolicy.correction import catalogue; print(catalogue.markdown())'."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [line for line in markdown().splitlines() if line not in page] == []


# How they are taken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRECTIONS)
def test_measuring_decides_nothing(name: str) -> None:
    """What is left out are keys; weight and keep are those of a full measurement."""
    batch = random_batch(5)
    stepped = {
        measure: stages(CORRECTIONS[name], batch, measure=measure) for measure in ("all", "decisions", "nothing")
    }
    everything = values(stepped["all"][1])
    some = values(stepped["decisions"][1])
    assert stepped["nothing"][0].statistics == stepped["nothing"][1].statistics == {}
    assert some == pytest.approx({key: everything[key] for key in some}, nan_ok=True)
    assert {"keep/token_share", "turn/first/keep_token_share", "weight/ess"} <= set(some) < set(everything)
    for _, step in stepped.values():
        assert torch.equal(step.weight, stepped["all"][1].weight)
        assert torch.equal(step.keep, stepped["all"][1].keep)


def test_padding_and_tool_tokens_are_not_read() -> None:
    batch = random_batch(2)
    off = ~batch.mask
    spoiled = replace(
        batch,
        mu=batch.mu.masked_fill(off, -math.inf),
        old=batch.old.masked_fill(off, NAN),
        pi=batch.pi.masked_fill(off, 1e30),
        advantages=batch.advantages.masked_fill(off, NAN),
        segments=batch.segments.masked_fill(off, -1),
        versions=batch.versions.masked_fill(off, -1),
    )
    for correction in CORRECTIONS.values():
        clean, dirty = (values(stages(correction, some)[1]) for some in (batch, spoiled))
        assert dirty == pytest.approx(clean, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_measured_in_full(dtype: torch.dtype) -> None:
    batch = random_batch(4, dtype=dtype)
    wide = replace(batch, **{name: getattr(batch, name).double() for name in ("mu", "old", "pi")})
    short, full = (values(stages(CORRECTIONS["token"], some)[1]) for some in (batch, wide))
    assert short == pytest.approx(full, rel=1e-5, abs=1e-9, nan_ok=True)


def test_autocast_takes_no_digits() -> None:
    """The loss runs under it; a matrix product in bfloat16 would count to 256."""
    batch = random_batch(6)
    plain = values(stages(CORRECTIONS["token"], batch)[1])
    with torch.autocast("cpu", torch.bfloat16):
        cast = values(stages(CORRECTIONS["token"], batch)[1])
    assert cast == pytest.approx(plain, rel=0, abs=0, nan_ok=True)


def test_parts_are_detached_float64() -> None:
    batch = random_batch(8)
    leaves = replace(batch, **{name: getattr(batch, name).clone().requires_grad_() for name in ("mu", "old", "pi")})
    for correction in CORRECTIONS.values():
        for name, statistic in stages(correction, leaves)[1].statistics.items():
            for part in statistic.parts:
                assert isinstance(part, Tensor), name
                assert (part.dtype, part.shape, part.requires_grad) == (torch.float64, (), False), name


@pytest.mark.parametrize("name", ["none", "token", "full"])
def test_nothing_waits_for_the_device(name: str) -> None:
    """On the meta device, where there are no values: whatever reads one, or mixes in a tensor of the CPU, fails."""
    batch = random_batch(9)
    there = Batch(*(getattr(batch, field.name).to("meta") for field in fields(batch)))
    statistics = stages(CORRECTIONS[name], there)[1].statistics
    parts = {part.device.type for one in statistics.values() for part in one.parts if isinstance(part, Tensor)}
    assert parts == {"meta"}
