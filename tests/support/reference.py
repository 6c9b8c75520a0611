"""An independent implementation of the vocabulary of corrections: one token at a time, in float64, with lists and the
math module.

It shares only the plain mappings that describe a correction with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

IN_FORCE = 20
"""Version of the weights that uses a batch; ages count from it."""

Row = list[float]
Plain = Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """Nested lists of one shape (B, T); ``segments`` and ``versions`` are the ids of turns and of weight versions."""

    mu: list[Row]
    old: list[Row]
    pi: list[Row]
    mask: list[list[bool]]
    advantages: list[Row]
    segments: list[list[int]]
    versions: list[list[int]]


@dataclass
class Expected:
    """Expected results of both stages.

    Attributes:
        weight: (B, T), 0 where a token does not count.
        keep: (B, T).
        rejected: key of a part -> (b, t) of the counted tokens that it rejects.
        margin: least distance of anything that was compared from its bound, relative where that is above 1.
    """

    weight: list[Row]
    keep: list[list[bool]]
    rejected: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    margin: float = math.inf


Token = tuple[int, int]


def expected(correction: Plain, batch: Batch) -> Expected:
    """Compute weight and keep of ``CorrectionSpec.to_mapping()``; ``batch.old`` is pi_old from any source."""
    counted = tokens_that_count(batch, correction)
    result = Expected([[0.0] * len(row) for row in batch.mask], [[False] * len(row) for row in batch.mask])
    masks, weight = correction["masks"], correction["weight"]
    left = set(counted)
    if correction.get("skyrl_compat"):
        # An outlier mask sees all tokens, a token mask decides by itself, and what goes by sequence sees the rest.
        for by_token in (False, True):
            for name, mask in masks.items():
                if (mask["level"] == "token") == by_token and (by_token or mask["aggregate"] == "any"):
                    result.rejected[f"masks.{name}"] = rejected_by(mask, batch, counted, result)
                    left -= result.rejected[f"masks.{name}"]
        seen = sorted(left)
    else:
        seen = counted
    for name, mask in masks.items():
        if (key := f"masks.{name}") not in result.rejected:
            result.rejected[key] = rejected_by(mask, batch, seen, result)

    for b, t in counted:
        result.weight[b][t] = 1.0
    if weight is not None:
        dropped: set[Token] = set()
        level = weight["level"]
        # With skyrl_compat the tokens that are masked already still carry their row's weight.
        carriers = {label(level, batch, unit[0]): unit for unit in units(level, batch, counted)}
        for unit, value, drops in weighed(weight, batch, counted if level == "token" else seen, result):
            for b, t in unit[-1:] if level == "prefix" else carriers[label(level, batch, unit[0])]:
                result.weight[b][t] = value
            dropped |= set(decided_by(level, unit)) if drops else set()
        if weight["kind"] == "reject":
            result.rejected["weight"] = dropped
    for name, part in correction.get("weights", {}).items():
        lost: set[Token] = set()
        signs = signed_by({"sign": "row", **part}, batch, counted)
        for unit, value, drops in weighed(part, batch, counted, result):
            for b, t in decided_by(part["level"], unit):
                if concerned(part, batch, signs, (b, t), result):
                    result.weight[b][t] = value
                    lost |= {(b, t)} if drops else set()
        if part["kind"] == "reject":
            result.rejected[f"weights.{name}"] = lost

    for drop in result.rejected.values():
        left -= drop
    for b, t in left:
        result.keep[b][t] = True
    return result


def tokens_that_count(batch: Batch, correction: Plain | None = None) -> list[Token]:
    """List (b, t) of the tokens in the response mask whose pi_old is finite, and whose mu is finite if the correction
    reads mu.
    """
    mu_counts = correction is None or reads_mu(correction)
    return [
        (b, t)
        for b, row in enumerate(batch.mask)
        for t, valid in enumerate(row)
        if valid and (math.isfinite(batch.mu[b][t]) or not mu_counts) and math.isfinite(batch.old[b][t])
    ]


def reads_mu(correction: Plain) -> bool:
    """Return True if the mapping reads mu: a weight always does, a mask on pi / pi_old or on an age does not."""
    masks = any(mask.get("ratio", "ppo") != "ppo" for mask in correction["masks"].values())
    weighed = bool(correction["weight"] or correction.get("weights"))
    penalised = correction.get("penalty", {"ratio": "ppo"})["ratio"] == "full"
    return weighed or masks or penalised or correction.get("proximal") in ("bypass", "same_engine", "loglinear")


def log_ratio(ratio: str, batch: Batch, token: Token) -> float:
    numerator, denominator = policies(ratio, batch, token)
    return numerator - denominator


def policies(ratio: str, batch: Batch, token: Token) -> tuple[float, float]:
    b, t = token
    mu, old, pi = batch.mu[b][t], batch.old[b][t], batch.pi[b][t]
    return {"rollout": (old, mu), "full": (pi, mu), "ppo": (pi, old)}[ratio]


def decided_by(level: str, unit: list[Token]) -> list[Token]:
    """List the tokens on which a unit decides; for a prefix, only the last token."""
    return unit[-1:] if level == "prefix" else unit


def label(level: str, batch: Batch, token: Token) -> tuple[int, ...]:
    """Return the unit's label; tokens with the same label form a unit."""
    b, t = token
    match level:
        case "token" | "prefix":
            return (b, t)
        case "sequence":
            return (b,)
        case "turn":
            return (b, batch.segments[b][t])
        case "version":
            return (b, batch.versions[b][t])
    raise ValueError(level)


def units(level: str, batch: Batch, tokens: list[Token]) -> list[list[Token]]:
    if level == "prefix":
        rows = units("sequence", batch, tokens)
        return [sorted(row)[: end + 1] for row in rows for end in range(len(row))]
    found: dict[tuple[int, ...], list[Token]] = {}
    for token in tokens:
        found.setdefault(label(level, batch, token), []).append(token)
    return list(found.values())


def age(batch: Batch, token: Token) -> int:
    b, t = token
    return max(IN_FORCE - batch.versions[b][t], 0)


def factor(part: Plain, batch: Batch, unit: list[Token]) -> float:
    """Return the factor of |log bound| for the age of the unit's oldest token."""
    if part.get("by_position"):
        return float(len(unit) ** part["by_position"])
    factors: list[float] = part.get("by_staleness") or [1.0]
    oldest = max(age(batch, token) for token in unit)
    return factors[oldest] if oldest < len(factors) else factors[-1]


def exp(value: float) -> float:
    return math.exp(clamp(value))


def clamp(value: float) -> float:
    return min(max(value, -20.0), 20.0)


# Weights ----------------------------------------------------------------------------------------------------


def weighed(
    weight: Plain, batch: Batch, tokens: list[Token], result: Expected
) -> Iterator[tuple[list[Token], float, bool]]:
    """Return each unit, its weight, and whether it is rejected."""
    found = []
    for unit in units(weight["level"], batch, tokens):
        value = math.fsum(log_ratio(weight["ratio"], batch, token) for token in unit)
        if weight["aggregate"] == "geometric":
            value /= len(unit)
        if weight["aggregate"] == "minimum":
            *before, own = (log_ratio(weight["ratio"], batch, token) for token in unit)
            value = own + min([0.0, *before])
        grown = factor(weight, batch, unit)
        low = None if weight.get("lower") is None else math.log(weight["lower"]) * grown
        high = None if weight.get("upper") is None else math.log(weight["upper"]) * grown
        drop, w = False, exp(value)
        if weight["kind"] == "gamma":
            w = math.exp(weight["rate"] * (1 - w) + weight["power"] * clamp(value))
            found.append((unit, w, False))
            continue
        if weight["kind"] == "reject":
            drop = beyond(value, low, high, result)
        else:
            w = w if low is None else max(w, math.exp(low))
            w = w if high is None else min(w, math.exp(high))
        found.append((unit, w, drop))
    divisor = 1.0
    if weight["normalize"] and found:
        total = math.fsum(0.0 if drop else w for _, w, drop in found)
        divisor = total / len(found) if total > 0 else 1.0
    for unit, w, drop in found:
        yield unit, w / divisor, drop


# Masks ------------------------------------------------------------------------------------------------------


def rejected_by(mask: Plain, batch: Batch, tokens: list[Token], result: Expected) -> set[Token]:
    if mask["aggregate"] == "second_moment":
        return beyond_budget(mask["budget"], batch, tokens, result)
    signs = signed_by(mask, batch, tokens)
    dropped: set[Token] = set()
    for unit in units(mask["level"], batch, tokens):
        values = statistics(mask, batch, unit)
        grown = [factor(mask, batch, unit)] * len(values)
        if mask["aggregate"] == "any" and mask.get("by_position"):  # each token by its own position
            grown = [factor(mask, batch, unit[: end + 1]) for end in range(len(unit))]
        low, high = bounds(mask)
        if any(
            beyond(value, None if low is None else low * grow, None if high is None else high * grow, result)
            for value, grow in zip(values, grown, strict=True)
        ):
            dropped |= {
                token
                for token in decided_by(mask["level"], unit)
                if concerned(mask, batch, signs, token, result, lambda token: log_ratio(mask["ratio"], batch, token))
            }
    return dropped


def bounds(mask: Plain) -> tuple[float | None, float | None]:
    """Return the bounds on the values of ``statistics``, as log ratios for aggregates that are bounded as ratios."""
    if "delta" in mask:
        return -mask["delta"], None
    pair = mask.get("lower"), mask["upper"]
    if mask["aggregate"] in ("product", "geometric", "any", "exp_abs_mean"):
        return tuple(None if bound is None else math.log(bound) for bound in pair)  # type: ignore[return-value]
    return pair


def statistics(mask: Plain, batch: Batch, unit: list[Token]) -> list[float]:
    """Return the values that must all lie within the bounds: one per unit, or one per token."""
    if mask["aggregate"] == "staleness":
        return [float(max(age(batch, token) for token in unit))]
    logs = [log_ratio(mask["ratio"], batch, token) for token in unit]
    match mask["aggregate"].split("_"):
        case ["product"]:
            return [math.fsum(logs)]
        case ["geometric"]:
            return [math.fsum(logs) / len(logs)]
        case ["any"]:
            return logs
        case ["exp", "abs", "mean"]:
            return [math.log(math.fsum(math.exp(min(abs(value), 20.0)) for value in logs) / len(logs))]
        case ["binary", kind, *reduction]:
            pairs = [policies(mask["ratio"], batch, token) for token in unit]
            if reduction and reduction[0] == "forward":
                each = [binary_kl(other, one) for one, other in pairs]
                return [math.fsum(each) / len(each)] if "mean" in reduction else each
            if kind == "kl":
                return [max(binary_kl(one, other), binary_kl(other, one)) for one, other in pairs]
            gaps = [math.exp(numerator) - math.exp(denominator) for numerator, denominator in pairs]
            return {"": gaps, "sum": [math.fsum(gaps)], "mean": [math.fsum(gaps) / len(gaps)]}["".join(reduction)]
        case [kind, reduction]:
            each = [divergence(kind, value) for value in logs]
            return [{"sum": math.fsum(each), "mean": math.fsum(each) / len(each), "max": max(each)}[reduction]]
    raise ValueError(mask["aggregate"])


def binary_kl(log_p: float, log_q: float) -> float:
    """KL of two coins, each between 1e-6 and 1 - 1e-6."""
    p, q = (min(max(math.exp(value), 1e-6), 1 - 1e-6) for value in (log_p, log_q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def divergence(kind: str, log_r: float) -> float:
    match kind:
        case "k1":
            return -log_r
        case "k2":
            return log_r * log_r / 2
        case "k3":
            return math.expm1(clamp(log_r)) - log_r
        case "tv":
            return abs(math.expm1(clamp(log_r))) / 2
    raise ValueError(kind)


def signed_by(mask: Plain, batch: Batch, tokens: list[Token]) -> dict[Token, float]:
    """Return, for each token, the advantage whose sign decides: its own, or the row's mean."""
    own = {(b, t): batch.advantages[b][t] for b, t in tokens}
    if mask["sign"] == "token":
        return own
    rows = units("sequence", batch, tokens)
    return {token: math.fsum(own[each] for each in row) / len(row) for row in rows for token in row}


def concerned(
    mask: Plain,
    batch: Batch,
    signs: dict[Token, float],
    token: Token,
    result: Expected,
    log_r: Callable[[Token], float] = lambda token: 0.0,
) -> bool:
    """Return True if the mask applies to this token, by the sign of an advantage or by its turn."""
    if mask["when"] == "any":
        return True
    if mask["when"] == "post_tool":
        return batch.segments[token[0]][token[1]] > 0
    advantage = signs[token]
    if advantage:
        result.margin = min(result.margin, abs(advantage))
    if mask["when"] == "outward":
        return advantage * log_r(token) > 0
    return advantage < 0 if mask["when"] == "negative" else advantage > 0


def beyond(value: float, low: float | None, high: float | None, result: Expected) -> bool:
    for bound in (low, high):
        # What lies at a bound exactly does so in any precision.
        if bound is not None and value != bound:
            result.margin = min(result.margin, abs(value - bound) / max(1.0, abs(bound)))
    return (low is not None and value < low) or (high is not None and value > high)


def beyond_budget(budget: float, batch: Batch, tokens: list[Token], result: Expected) -> set[Token]:
    """M2PO: drop the tokens with the largest (log rho)^2, equal values together, until the mean of the rest is within
    the budget.
    """
    squares = {token: log_ratio("rollout", batch, token) ** 2 for token in tokens}
    dropped: set[Token] = set()
    while rest := [token for token in tokens if token not in dropped]:
        mean = math.fsum(squares[token] for token in rest) / len(rest)
        result.margin = min(result.margin, abs(mean / budget - 1))
        if mean <= budget:
            break
        largest = max(squares[token] for token in rest)
        dropped |= {token for token in rest if squares[token] == largest}
    return dropped
