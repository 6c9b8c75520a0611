"""Every statistic, compared with a per-token reference, for any split of the rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec, StepStage
from tests.support.corrections import TIS, run, spec, values
from tests.support.telemetry_cases import CORRECTIONS, NAN, Batch, random_batch, stages


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
    """Compute every statistic except ``raw_weight`` per token in float64, from weight, keep and rejections as
    decided.
    """
    mu, old, pi = (t.double().tolist() for t in (batch.mu, batch.old, batch.pi))
    mask, keep, advantages = batch.mask.tolist(), step.keep.tolist(), batch.advantages.tolist()
    rows = range(len(mask))
    response = [[t for t, on in enumerate(row) if on] for row in mask]
    valid = [[t for t in response[b] if math.isfinite(mu[b][t]) and math.isfinite(old[b][t])] for b in rows]
    decided = valid if correction.reads_mu else [[t for t in response[b] if math.isfinite(old[b][t])] for b in rows]
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
    weight = step.weight.double().tolist()
    rejected = [drop for key, drop in dropped.items() if key.startswith("weight")]
    result |= distribution("weight", [0.0 if any(drop[b][t] for drop in rejected) else weight[b][t] for b, t in tokens])
    logs = list(log_rho.values())
    if correction.penalty is not None:
        result["penalty/mean"] = mean([(pi[b][t] - old[b][t]) ** 2 for b, t in tokens_of(rows, decided)])
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

    signs = {b: math.fsum(advantages[b][t] for t in decided[b]) for b in rows}
    by_sign = {"": rows, "positive/": [b for b in rows if signs[b] > 0], "negative/": [b for b in rows if signs[b] < 0]}
    of_tokens = [dropped[f"masks.{name}"] for name, mask in correction.masks if mask.level == "token"]
    result["keep/token_mask_ratio"] = mean(
        [float(t in decided[b] and any(drop[b][t] for drop in of_tokens)) for b, t in tokens_of(rows)]
    )
    for sign, some in by_sign.items():
        result[f"keep/{sign}token_share"] = keep_token_share(tokens_of(some))
        result[f"keep/{sign}sequence_share"] = keep_row_share([b for b in some if response[b]])
        for key, drop in dropped.items():
            name = f"{key.replace('masks.', 'mask/').replace('.', '/')}/{sign}"
            result[f"{name}masked_token_share"] = mean(
                [float(t in decided[b] and drop[b][t]) for b, t in tokens_of(some)]
            )
            result[f"{name}masked_sequence_share"] = mean(
                [float(all(drop[b][t] for t in decided[b])) for b in some if decided[b]]
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
    """The tolerance is 1e-5 for log-probs in float32, and 1e-9 in addition for means whose terms cancel."""
    correction, batch = CORRECTIONS[name], random_batch(7, rows=24, dtype=dtype)
    _, step = stages(correction, batch)
    result = values(step)
    expected = reference(batch, step, correction)
    others = {key for key in result if key.startswith("raw_weight/") or key == "weight/truncated_share"}
    assert set(result) - others == set(expected)
    tolerance = dict(rel=1e-5, abs=1e-9) if dtype is torch.float32 else dict(rel=1e-9, abs=1e-12)
    assert {key: result[key] for key in expected} == pytest.approx(expected, nan_ok=True, **tolerance)


def test_a_raw_weight_is_before_bounds_and_the_mean() -> None:
    """Ratios 2 and 4 truncated at 3: weights 2 and 3, divided by 2.5."""
    correction = spec(TIS | {"upper": 3.0, "normalize": True})
    result = values(run(correction, mu=[[0.0, 0.0]], old=[[math.log(2), math.log(4)]]))
    assert (result["raw_weight/mean"], result["raw_weight/max"]) == (pytest.approx(3.0), pytest.approx(4.0))
    assert (result["weight/mean"], result["weight/max"]) == (pytest.approx(1.0), pytest.approx(1.2))
    assert result["weight/truncated_share"] == 0.5


def test_weights_outside_either_bound_count_as_truncated() -> None:
    correction = spec(TIS | {"kind": "clip", "lower": 0.5, "upper": 3.0})
    result = values(run(correction, mu=[[0.0] * 4], old=[[math.log(ratio) for ratio in (0.25, 0.3, 1.0, 4.0)]]))
    assert result["weight/truncated_share"] == 0.75
