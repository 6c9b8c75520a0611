"""Reported measures of a correction, from sums over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...correction.catalogue import SIGNS
from .gradient_sums import INDEX, REFERENCES, TURN_GROUPS

Sums = NDArray[np.float64]
"""(L, len(COLUMNS)): the sums over a group's rows of each length bucket; the last line is of rows without length."""

FEW = 30.0
"""Effective rows that a reference by sequence needs."""


@dataclass(frozen=True)
class CorrectionMeasures:
    """Effect of a correction on a set of tokens; None where there is nothing to measure by.

    f = w k r s is a token's gradient weight, r its base loss's factor, s the scale of its row under
    ``denominator=kept``, A its advantage (``gradient_sums``); n counts valid tokens.

    Attributes:
        tokens, rows: response tokens, and rows with one.
        kept_tokens, kept_rows: shares kept of them; a row is kept if a token of it is.
        ess: effective sample size of w k, (sum w k)^2 / (n sum (w k)^2), at most ``kept_tokens``.
        ess_rows: likewise, of each row's mean of w k.
        mismatch_left: share of the mismatch that lies on tokens which are kept, sum k3 k / sum k3 with
            k3 = rho - 1 - log rho of the token's rho = pi / mu (Schulman 2020), the sum of which estimates KL(mu, pi).
            What a mask is for: the further below ``kept_tokens``, the better it picks the tokens that are off.
        lr_scale: norm of the corrected gradient weights against that of the uncorrected ones,
            sqrt(sum (f A)^2 / sum (r A)^2): by how much the correction turns the learning rate, were the gradients of
            tokens of one size and unrelated.
        projection: sum f A r A / sum (r A)^2, the part of the uncorrected gradient weights that is left in their own
            direction, signed.
        reference_rows: effective number of rows whose pi / mu the reference of ``bias_sequence`` rests on,
            (sum rho)^2 / sum rho^2.
        bias_token, bias_sequence: distance of the gradient weights from those of an unbiased estimator, relative to
            the latter's norm, sqrt(sum ((f - rho) A)^2 / sum (rho A)^2). The reference rho is the untruncated pi / mu
            of the token (unbiased for PPO's surrogate, which leaves the distribution of prefixes as it is) or of the
            whole row (unbiased for the policy gradient). By the Cauchy-Schwarz inequality no gradient of unit second
            moment can be off by more: an upper bound of the bias, which also counts noise that would average out.
            None by sequence, where the reference rests on fewer than ``FEW`` rows.
        bias_token_systematic, bias_sequence_systematic: the part of that which cannot average out over these tokens:
            the shift of the mean in each cell of length bucket and sign of A,
            sqrt(sum_c n_c mean_c((f - rho) A)^2 / sum (rho A)^2). What varies within a cell is not in it.
    """

    tokens: int
    rows: int
    kept_tokens: float | None
    kept_rows: float | None
    ess: float | None
    ess_rows: float | None
    mismatch_left: float | None
    lr_scale: float | None
    projection: float | None
    reference_rows: float
    bias_token: float | None
    bias_token_systematic: float | None
    bias_sequence: float | None
    bias_sequence_systematic: float | None


@dataclass(frozen=True)
class TurnShare:
    """Kept share of a group that splits rows.

    Attributes:
        tokens: response tokens.
        kept_tokens: share kept of them; None where there is none.
    """

    tokens: int
    kept_tokens: float | None


def compute_measures(sums: Sums) -> CorrectionMeasures:
    """Compute the measures of one group of rows."""

    def of(name: str) -> float:
        return float(sums[:, INDEX[name]].sum())

    reference_rows = _over(of("ratio") ** 2, of("ratio_square")) or 0.0
    # A reference that rests on a few rows is noise: then no bias by sequence is reported.
    judges = reference_rows >= FEW
    bias = {name: _root(_over(of(f"distance/{name}"), of(f"reference/{name}"))) for name in REFERENCES}
    shift = {name: _root(_over(_shift(name, sums), of(f"reference/{name}"))) for name in REFERENCES}
    return CorrectionMeasures(
        tokens=round(of("tokens")),
        rows=round(of("rows")),
        kept_tokens=_over(of("kept"), of("tokens")),
        kept_rows=_over(of("kept_rows"), of("rows")),
        ess=_ess(of("applied"), of("applied_square"), of("valid")),
        ess_rows=_ess(of("row_applied"), of("row_applied_square"), of("valid_rows")),
        mismatch_left=_over(of("mismatch/kept"), of("mismatch")),
        lr_scale=_root(_over(of("corrected"), of("uncorrected"))),
        projection=_over(of("product"), of("uncorrected")),
        reference_rows=reference_rows,
        bias_token=bias["token"],
        bias_token_systematic=shift["token"],
        bias_sequence=bias["sequence"] if judges else None,
        bias_sequence_systematic=shift["sequence"] if judges else None,
    )


def compute_turn_shares(sums: Sums) -> dict[str, TurnShare]:
    """Compute the kept share by the number of the turn."""
    shares = {}
    for name in TURN_GROUPS:
        tokens, kept = (float(sums[:, INDEX[f"turn/{name}/{column}"]].sum()) for column in ("tokens", "kept"))
        shares[f"turn/{name}"] = TurnShare(round(tokens), _over(kept, tokens))
    return shares


def _shift(reference: str, sums: Sums) -> float:
    """Sum n_c mean_c^2 = S_c^2 / n_c over cells c, by length bucket and sign of A."""
    total = 0.0
    for sign in SIGNS:
        count, shift = sums[:, INDEX[f"count/{sign}"]], sums[:, INDEX[f"shift/{reference}/{sign}"]]
        total += float((shift[count > 0] ** 2 / count[count > 0]).sum())
    return total


def _ess(total: float, square: float, count: float) -> float | None:
    if not count:
        return None
    return total**2 / (count * square) if square else 0.0


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)
