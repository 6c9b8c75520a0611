"""Measures of a correction's effect on the gradient, and agreement of corrections, from sums over rows in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...correction import CorrectionSpec
from ...correction.ratios import EXP_CLAMP, clamp_and_exp, compute_log_ratio, find_valid_tokens
from ...correction.statistics import BUCKETS, SIGNS, STALENESS
from ...recording import Rows
from .replay import Array, Block, Decision, RecordedLoss

TURN_GROUPS = ("is0", "is1", "is2", "ge3")
"""Groups of a row's turns by turn number, from 0; they are named like the staleness groups."""
REFERENCES = ("token", "sequence")

COLUMNS = (
    "tokens",  # response tokens
    "rows",  # with a response token
    "valid",  # tokens whose mu and pi_old are finite
    "kept",
    "kept_rows",  # with a token kept
    "applied",  # sum of w k
    "applied_square",
    "corrected",  # sum of (f A)^2
    "uncorrected",
    *(f"reference/{reference}" for reference in REFERENCES),  # sum of (rho A)^2
    "ratio",  # sum over rows of pi / mu of the whole row
    "ratio_square",
    *(f"distance/{reference}" for reference in REFERENCES),  # sum of ((f - rho) A)^2
    # sum of (f - rho) A over tokens of A of one sign
    *(f"shift/{reference}/{sign}" for reference in REFERENCES for sign in SIGNS),
    *(f"count/{sign}" for sign in SIGNS),
    *(f"turn/{turn}/tokens" for turn in TURN_GROUPS),
    *(f"turn/{turn}/kept" for turn in TURN_GROUPS),
    "mismatch",  # sum of k3 of pi / mu
    "mismatch/kept",
)
INDEX = {name: place for place, name in enumerate(COLUMNS)}


@dataclass(frozen=True)
class ReferenceBlock:
    """A block, with the quantities that do not depend on the correction.

    Attributes:
        block: the rows.
        counted: (B, W) bool, tokens at which gradient weights are compared, that is, where mu, pi_old, pi and A are
            all finite.
        advantages: (B, W) float64, 0 where ``counted`` is False.
        loss: the run's loss.
        base_factor: (B, W) float64, factor of the base loss with the recorded pi_old.
        ideal: rho A by reference, (B, W); rho is pi / mu of the token, or of all the row's tokens.
        mismatch: (B, W) float64, k3 = rho - 1 - log rho of each token, the sum of which estimates KL(mu, pi); never
            below 0.
        signs: (B, W) float64 of 0 and 1 for each of ``SIGNS``: tokens of positive and of negative advantage.
        turns: (B, W) bool by turn group; empty if no row has a second turn.
        shared: columns that do not depend on the correction, (B,) each.
    """

    block: Block
    counted: Tensor
    advantages: Tensor
    loss: RecordedLoss
    base_factor: Tensor
    ideal: dict[str, Tensor]
    mismatch: Tensor
    signs: dict[str, Tensor]
    turns: dict[str, Tensor]
    shared: dict[str, Tensor]


def build_reference_block(block: Block, loss: RecordedLoss) -> ReferenceBlock:
    """Build the quantities with which a block's corrections are compared."""
    log_probs = (block.rollout_log_prob, block.old_log_prob, block.log_prob)
    counted = find_valid_tokens(block.mask, *log_probs, block.advantages)
    full = compute_log_ratio(block.log_prob, block.rollout_log_prob, counted)
    advantages = torch.where(counted, block.advantages, 0.0).double()
    log_r = compute_log_ratio(block.log_prob, block.old_log_prob, counted)
    base_factor = loss.compute_factor(log_r, advantages)
    uncorrected = base_factor * advantages
    of_row = clamp_and_exp(full.sum(-1, keepdim=True))
    ideal = {"token": clamp_and_exp(full) * advantages, "sequence": of_row * advantages}
    mismatch = torch.expm1(full.clamp(-EXP_CLAMP, EXP_CLAMP)) - full
    signs = dict(zip(SIGNS, ((advantages > 0).double(), (advantages < 0).double()), strict=True))
    turn, mask, tokens = block.turn, block.mask, block.mask.sum(-1).double()
    turns = {
        name: mask & (turn >= i if name.startswith("ge") else turn == i)
        for i, name in enumerate(TURN_GROUPS)
        if bool((turn > 0).any())
    }
    # A row without a counted token has the ratio exp(0) = 1, which must not be counted.
    ratio = of_row[:, 0] * counted.any(-1)
    shared = {
        "tokens": tokens,
        "rows": (tokens > 0).double(),
        "uncorrected": _dot(uncorrected, uncorrected),
        "mismatch": mismatch.sum(-1),
        "ratio": ratio,
        "ratio_square": ratio.square(),
        **{f"reference/{name}": _dot(each, each) for name, each in ideal.items()},
        **{f"count/{name}": sign.sum(-1) for name, sign in signs.items()},
        "turn/is0/tokens": tokens,
        **{f"turn/{name}/tokens": each.sum(-1).double() for name, each in turns.items()},
    }
    return ReferenceBlock(block, counted, advantages, loss, base_factor, ideal, mismatch, signs, turns, shared)


def weigh_advantages(spec: CorrectionSpec, by: Decision, of: ReferenceBlock, scale: Array | None = None) -> Tensor:
    """Compute f A, as defined in ``replay``, minus the penalty's term: (B, W) float64, 0 where ``of.counted`` is
    False.

    Args:
        scale: (N,) factor s of each row in the step; None if it is 1 for all rows.
    """
    of_row = None if scale is None else torch.from_numpy(scale[of.block.rows])[:, None]
    weight = torch.where(by.keep, by.weight, 0.0).double() * of.counted
    if of_row is not None:
        weight = weight * of_row
    # A weight on pi / mu replaces the base loss's ratio.
    if not spec.weighs_full_ratio:
        # The factor depends only on pi_old, so it is computed once per block for each pi_old.
        factor = of.base_factor
        if by.old_log_prob is not of.block.old_log_prob:
            log_r = compute_log_ratio(of.block.log_prob, by.old_log_prob, of.counted)
            factor = of.loss.compute_factor(log_r, of.advantages)
        weight = weight * factor
    weighed = weight * of.advantages
    if spec.penalty is None:
        return weighed
    other = of.block.rollout_log_prob if spec.penalty.ratio == "full" else by.old_log_prob
    # The penalty 2 c log r; ``denominator=kept`` applies only to the policy term.
    pull = 2 * spec.penalty.coefficient * compute_log_ratio(of.block.log_prob, other, of.counted)
    return weighed - (pull if of_row is None or spec.nonfinite == "counted" else pull * of_row)


def compute_row_sums(by: Decision, of: ReferenceBlock, weighed: Tensor) -> Array:
    """Compute the sums of each row: (B, len(COLUMNS)).

    Args:
        weighed: (B, W) f A, see ``weigh_advantages``.
    """
    applied = torch.where(by.keep, by.weight, 0.0).double()
    kept = by.keep.sum(-1).double()
    columns = of.shared | {
        "valid": by.valid.sum(-1).double(),
        "kept": kept,
        "kept_rows": (kept > 0).double(),
        "applied": applied.sum(-1),
        "applied_square": _dot(applied, applied),
        "corrected": _dot(weighed, weighed),
        "mismatch/kept": torch.where(by.keep, of.mismatch, 0.0).sum(-1),
        "turn/is0/kept": kept,
        **{f"turn/{name}/kept": (turn & by.keep).sum(-1).double() for name, turn in of.turns.items()},
    }
    for reference, ideal in of.ideal.items():
        gap = weighed - ideal
        columns[f"distance/{reference}"] = _dot(gap, gap)
        columns |= {f"shift/{reference}/{sign}": _dot(gap, where) for sign, where in of.signs.items()}
    table = torch.zeros(len(kept), len(COLUMNS), dtype=torch.float64)
    for name, values in columns.items():
        table[:, INDEX[name]] = values
    return table.numpy()


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Sum a product over each row without a temporary array of the same size; torch's einsum takes twice as long."""
    return torch.from_numpy(np.einsum("bw,bw->b", one.numpy(), other.numpy()))


GROUPS = (
    "",
    *(f"length/{name}" for name in BUCKETS),
    *(f"advantage/{name}" for name in SIGNS),
    *(f"staleness/{name}" for name in STALENESS),
)
"""Groups of rows; the group "" contains all rows."""


def sum_by_group(rows: Rows, tables: Iterable[Array]) -> list[Array]:
    """Sum the (N, columns) of each table by group and length bucket, (G, L, columns).

    Rows are grouped as in ``correction.statistics``. Length counts valid tokens, whose mu and pi_old are finite. The
    sign is that of the sum of advantages over the row's valid tokens. Staleness is that of the row's first token. The
    last of the L buckets contains the rows without a valid token, so that totals stay complete.
    """
    valid = rows.response_mask & np.isfinite(rows.rollout_log_prob) & np.isfinite(rows.old_log_prob)
    length = _sum_by_row(valid.astype(np.float64), rows)
    known = np.nan_to_num(rows.advantages, nan=0.0, posinf=0.0, neginf=0.0)
    advantage = _sum_by_row(np.where(valid, known, 0.0), rows)
    limits = [most for most in BUCKETS.values() if most is not None]
    bucket = np.where(length > 0, np.searchsorted(limits, length, side="left"), len(BUCKETS))
    buckets, age = np.arange(len(BUCKETS) + 1)[:, None], rows.staleness
    groups = [
        np.ones(len(rows), dtype=bool),
        *(bucket == buckets[:-1]),
        advantage > 0,
        advantage < 0,
        *(age >= index if name.startswith("ge") else age == index for index, name in enumerate(STALENESS)),
    ]
    # All sums over groups are computed by one matrix product, which uses torch; see ``jobs.prepare_process``.
    member = (np.stack(groups)[:, None, :] & (bucket == buckets)).reshape(-1, len(rows)).astype(np.float64)
    return [
        (torch.from_numpy(member) @ torch.from_numpy(table)).numpy().reshape(len(groups), -1, table.shape[1])
        for table in tables
    ]


def _sum_by_row(values: Array, rows: Rows) -> Array:
    ends = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return ends[rows.offsets[1:]] - ends[rows.offsets[:-1]]


@dataclass(frozen=True)
class Agreement:
    """Agreement of each pair of S corrections; (S, S) each, symmetric, NaN if undefined.

    Attributes:
        jaccard_tokens, jaccard_rows: share of tokens, or rows, that both reject, among those that at least one of the
            two rejects; undefined if neither rejects anything.
        cosine: cosine of the gradient weights f A.
    """

    jaccard_tokens: Array
    jaccard_rows: Array
    cosine: Array


def compare_pairs(keep: Sequence[Tensor], weighed: Sequence[Tensor], counted: Tensor) -> Array:
    """Compare each pair of S corrections on one block; the results of several blocks can be added.

    Args:
        keep: (B, W) bool for each correction.
        weighed: (B, W) float64 for each correction: its gradient weights f A.
        counted: (B, W) bool, tokens that are compared. A row is rejected if all of these tokens are rejected.

    Returns:
        (3, S, S): for each pair, the number of tokens that both reject, the number of rows that both reject, and the
        inner product of their gradient weights.
    """
    rejected = torch.stack([counted & ~one for one in keep])
    whole = (rejected.sum(-1) == counted.sum(-1)) & counted.any(-1)
    # Float32 represents the counts of a block exactly.
    columns = (rejected.flatten(1).float(), whole.float(), torch.stack(list(weighed)).flatten(1))
    return np.stack([(column @ column.T).double().numpy() for column in columns])


def compute_agreement(pairs: Array) -> Agreement:
    """Compute the agreement from the added results of ``compare_pairs``."""
    tokens, rows, gram = pairs
    of_tokens, of_rows = (_divide_all(both, np.diag(both)[:, None] + np.diag(both) - both) for both in (tokens, rows))
    # The Gram matrix of the gradient weights yields all cosines at once.
    norm = np.sqrt(np.diag(gram))
    return Agreement(of_tokens, of_rows, _divide_all(gram, norm[:, None] * norm))


def _divide_all(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.full_like(part, math.nan), where=whole > 0)


FEW = 30.0
"""Minimum effective number of rows for a reference per sequence."""


@dataclass(frozen=True)
class CorrectionMeasures:
    """Effect of a correction on a set of tokens; a field is None if it cannot be measured.

    f = w k r s is a token's gradient weight, r is its base loss's factor, s is its row's scale under
    ``denominator=kept``, and A is its advantage (see ``replay``); n is the number of valid tokens.

    Attributes:
        tokens, rows: number of response tokens, and number of rows with a response token.
        kept_tokens, kept_rows: the shares of tokens and rows that are kept; a row is kept if at least one of its tokens
            is kept.
        ess: effective sample size of w k, (sum w k)^2 / (n sum (w k)^2), at most ``kept_tokens``.
        mismatch_left: share of the mismatch that lies on kept tokens, sum k3 k / sum k3, where k3 = rho - 1 - log rho
            with the token's rho = pi / mu (Schulman 2020); the sum of k3 estimates KL(mu, pi). A mask should reduce
            this share: the further it is below ``kept_tokens``, the better the mask selects the tokens that deviate.
        lr_scale: norm of the corrected gradient weights relative to the uncorrected ones, sqrt(sum (f A)^2 / sum (r
            A)^2): the factor by which the correction would change the learning rate if the tokens' gradients had equal
            norms and were uncorrelated.
        reference_rows: effective number of rows that determine, by their pi / mu, the reference of ``bias_sequence``,
            (sum rho)^2 / sum rho^2.
        bias_token, bias_sequence: distance of the gradient weights from those of an unbiased estimator, relative to the
            latter's norm, sqrt(sum ((f - rho) A)^2 / sum (rho A)^2). The reference rho is the untruncated pi / mu of
            the token (unbiased for PPO's surrogate, which does not change the distribution of prefixes) or of the whole
            row (unbiased for the policy gradient). By the Cauchy-Schwarz inequality, no gradient with unit second
            moment can deviate by more. The distance is therefore an upper bound of the bias, and also includes noise
            that would average out. ``bias_sequence`` is None if the reference is based on fewer than ``FEW`` rows.
        bias_token_systematic, bias_sequence_systematic: the part of this distance that cannot average out over these
            tokens. It is the shift of the mean in each cell of length bucket and sign of A, sqrt(sum_c n_c mean_c((f -
            rho) A)^2 / sum (rho A)^2). Variation within a cell is not included.
    """

    tokens: int
    rows: int
    kept_tokens: float | None
    kept_rows: float | None
    ess: float | None
    mismatch_left: float | None
    lr_scale: float | None
    reference_rows: float
    bias_token: float | None
    bias_token_systematic: float | None
    bias_sequence: float | None
    bias_sequence_systematic: float | None


def compute_measures(sums: Array) -> CorrectionMeasures:
    """Compute the measures of one group of rows.

    Args:
        sums: (L, len(COLUMNS)) sums over the rows of the group in each length bucket.
    """
    total = dict(zip(COLUMNS, sums.sum(0).tolist(), strict=True))
    reference_rows = _divide(total["ratio"] ** 2, total["ratio_square"]) or 0.0
    bias, shift = {}, {}
    for name in REFERENCES:
        # Sum n_c mean_c^2 = S_c^2 / n_c over cells c, which are defined by length bucket and sign of A.
        cells = [(sums[:, INDEX[f"count/{sign}"]], sums[:, INDEX[f"shift/{name}/{sign}"]]) for sign in SIGNS]
        systematic = sum(float((moved[count > 0] ** 2 / count[count > 0]).sum()) for count, moved in cells)
        bias[name] = _root(_divide(total[f"distance/{name}"], total[f"reference/{name}"]))
        shift[name] = _root(_divide(systematic, total[f"reference/{name}"]))
    # A reference that is based on few rows is mostly noise, so no per-sequence bias is reported.
    judges = reference_rows >= FEW
    square = total["applied_square"]
    return CorrectionMeasures(
        tokens=round(total["tokens"]),
        rows=round(total["rows"]),
        kept_tokens=_divide(total["kept"], total["tokens"]),
        kept_rows=_divide(total["kept_rows"], total["rows"]),
        ess=_divide(total["applied"] ** 2 / square if square else 0.0, total["valid"]),
        mismatch_left=_divide(total["mismatch/kept"], total["mismatch"]),
        lr_scale=_root(_divide(total["corrected"], total["uncorrected"])),
        reference_rows=reference_rows,
        bias_token=bias["token"],
        bias_token_systematic=shift["token"],
        bias_sequence=bias["sequence"] if judges else None,
        bias_sequence_systematic=shift["sequence"] if judges else None,
    )


@dataclass(frozen=True)
class TurnShare:
    """Kept share of a group of parts of rows, such as a turn.

    Attributes:
        tokens: response tokens.
        kept_tokens: the share of these tokens that is kept; None if there are no tokens.
    """

    tokens: int
    kept_tokens: float | None


def compute_turn_shares(sums: Array) -> dict[str, TurnShare]:
    """Compute the kept share by turn number; turns without a token are omitted."""
    total = dict(zip(COLUMNS, sums.sum(0).tolist(), strict=True))
    return {
        f"turn/{name}": TurnShare(round(tokens), _divide(total[f"turn/{name}/kept"], tokens))
        for name in TURN_GROUPS
        if (tokens := total[f"turn/{name}/tokens"])
    }


def _divide(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)
