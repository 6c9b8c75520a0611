"""Results of a replay: measures computed from sums over rows, and the agreement of corrections, as values and JSON.

Keys:

* ``schema``: 1; increases whenever a key is removed or changes its meaning.
* ``recording``: ``directory``, ``steps`` (list), ``rows``, ``tokens`` (response tokens).
* ``fidelity``: comparison of the recorded correction's replay with the recording: ``agrees`` (null if there was no
  comparison), ``tolerance``, and the fields of ``fidelity.Fidelity``.
* ``corrections``: a list of
    * ``label``, ``base`` and ``point`` (the values of the grid keys);
    * ``spec``: plain values; null if the correction is the one recorded at each step;
    * ``overall``, ``groups`` (``length/le64``, ``advantage/negative``, ``staleness/is1``) and ``steps`` (by number):
      the fields of ``measures.CorrectionMeasures``; null where a measure is not possible;
    * ``turns`` (``turn/is0``): the fields of ``measures.TurnShare``.
* ``agreement``: ``labels`` and, in their order, the matrices of ``Agreement``; null where undefined.
* ``failures``: label -> why the correction was not replayed.
* ``notes``: limitations of the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...correction.statistics import SIGNS
from ..table import to_plain
from .candidates import Candidate
from .gradient_sums import INDEX, REFERENCES, TURN_GROUPS
from .replay import Block, Decision

Matrix = NDArray[np.float64]


class AgreementCounter:
    """Counts, over blocks, of the tokens and rows that both corrections of a pair reject, for all pairs among S."""

    def __init__(self, corrections: int) -> None:
        self.tokens, self.rows = (np.zeros((corrections, corrections)) for _ in range(2))
        self.gram = np.zeros((corrections, corrections))

    def add(self, places: list[int], keep: list[Tensor], weighed: list[Tensor], counted: Tensor) -> None:
        """Add one block.

        Args:
            places: indices of these corrections among the S corrections.
            keep: (B, W) bool for each correction.
            weighed: (B, W) float64 for each correction: its gradient weights f A.
            counted: (B, W) bool, tokens that are compared. A row is rejected if all of these tokens are rejected.
        """
        if not places:
            return
        rejected = torch.stack([counted & ~one for one in keep])
        whole = (rejected.sum(-1) == counted.sum(-1)) & counted.any(-1)
        # Float32 represents the counts of a block exactly.
        flat, by_row = rejected.flatten(1).float(), whole.float()
        at = np.ix_(places, places)
        self.tokens[at] += (flat @ flat.T).numpy()
        self.rows[at] += (by_row @ by_row.T).numpy()
        gradient = torch.stack(weighed).flatten(1)
        self.gram[at] += (gradient @ gradient.T).numpy()

    def add_counts(self, other: AgreementCounter) -> None:
        """Add the counts of other blocks for the same corrections."""
        self.tokens += other.tokens
        self.rows += other.rows
        self.gram += other.gram

    def compute_agreement(self, places: list[int]) -> Agreement:
        """Compute the agreement of the corrections that occurred in every block."""
        at = np.ix_(places, places)
        tokens, rows, gram = self.tokens[at], self.rows[at], self.gram[at]
        # The Gram matrix of the gradient weights yields all cosines at once.
        norm = np.sqrt(np.diag(gram))
        scale = norm[:, None] * norm[None, :]
        return Agreement(
            jaccard_tokens=_jaccard(tokens),
            jaccard_rows=_jaccard(rows),
            cosine=np.divide(gram, scale, out=np.full_like(scale, math.nan), where=scale > 0),
        )


@dataclass(frozen=True)
class Agreement:
    """Agreement of each pair of S corrections; (S, S) each, symmetric, NaN if undefined.

    Attributes:
        jaccard_tokens, jaccard_rows: of the tokens, or rows, that at least one of the two rejects, the share that both
            reject; undefined if neither rejects anything.
        cosine: cosine of the gradient weights f A.
    """

    jaccard_tokens: Matrix
    jaccard_rows: Matrix
    cosine: Matrix


def _jaccard(both: Matrix) -> Matrix:
    own = np.diag(both)
    either = own[:, None] + own[None, :] - both
    return np.divide(both, either, out=np.full_like(both, math.nan), where=either > 0)


TOLERANCE = 1e-5
"""Relative tolerance when weights are compared. Weights are float32, exponentiated on the run's own device."""


@dataclass(frozen=True)
class Fidelity:
    """Comparison of the recorded correction's replay with the decisions in the recording.

    Attributes:
        tokens: number of compared response tokens, whose mu and pi_old are finite; a correction does not act on other
            tokens.
        weights: number of compared tokens whose weight differs by more than ``TOLERANCE``.
        rejections: number of compared tokens for which the rejecting parts differ from the record; decisions must match
            exactly.
        weight_error: largest relative difference of a weight.
    """

    tokens: int = 0
    weights: int = 0
    rejections: int = 0
    weight_error: float = 0.0

    @property
    def agrees(self) -> bool:
        return not (self.weights or self.rejections)

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(
            self.tokens + other.tokens,
            self.weights + other.weights,
            self.rejections + other.rejections,
            max(self.weight_error, other.weight_error),
        )


def compare_with_record(by: Decision, of: Block, reasons: Sequence[str]) -> Fidelity:
    """Compare one block.

    Args:
        by: the recorded correction's decision in the replay.
        reasons: names of the bits of ``rejected_by``.
    """
    # Rebuild the recorded bit field, with one bit per reason.
    replayed = torch.zeros_like(of.rejected_by)
    for bit, reason in enumerate(reasons):
        if (drop := by.rejected.get(reason)) is not None:
            replayed |= (drop & by.valid).int() << bit
    other = of.mask & (replayed != of.rejected_by)
    # Rejections by a part that the record does not name are included as well.
    other |= of.mask & by.valid & ((of.rejected_by == 0) != by.keep)
    # Weights have no effect outside the valid tokens.
    error = ((by.weight - of.weight).abs() / of.weight.abs().clamp(min=1e-30)).nan_to_num(torch.inf)
    error = torch.where(by.valid & (by.weight != of.weight), error, 0.0)
    beyond = error > TOLERANCE
    return Fidelity(
        tokens=int((of.mask & by.valid).sum()),
        weights=int(beyond.sum()),
        rejections=int(other.sum()),
        weight_error=float(error.max()) if error.numel() else 0.0,
    )


Sums = NDArray[np.float64]
"""(L, len(COLUMNS)): the sums over the rows of a group in each length bucket; the last bucket is for rows without a
length."""

FEW = 30.0
"""Minimum effective number of rows for a reference per sequence."""


@dataclass(frozen=True)
class CorrectionMeasures:
    """Effect of a correction on a set of tokens; a field is None if it cannot be measured.

    f = w k r s is a token's gradient weight, r is its base loss's factor, s is its row's scale under
    ``denominator=kept``, and A is its advantage (``gradient_sums``); n is the number of valid tokens.

    Attributes:
        tokens, rows: number of response tokens, and of rows with a response token.
        kept_tokens, kept_rows: the shares of tokens and rows that are kept; a row is kept if at least one of its tokens
            is kept.
        ess: effective sample size of w k, (sum w k)^2 / (n sum (w k)^2), at most ``kept_tokens``.
        mismatch_left: share of the mismatch that lies on kept tokens, sum k3 k / sum k3, where k3 = rho - 1 - log rho
            with the token's rho = pi / mu (Schulman 2020); the sum of k3 estimates KL(mu, pi). A mask should reduce
            this share: the further it is below ``kept_tokens``, the better the mask selects the tokens that deviate.
        lr_scale: norm of the corrected gradient weights relative to the uncorrected ones, sqrt(sum (f A)^2 / sum (r
            A)^2): the factor by which the correction would change the learning rate if the tokens' gradients had equal
            size and were unrelated.
        reference_rows: effective number of rows that determine, by their pi / mu, the reference of ``bias_sequence``,
            (sum rho)^2 / sum rho^2.
        bias_token, bias_sequence: distance of the gradient weights from those of an unbiased estimator, relative to the
            latter's norm, sqrt(sum ((f - rho) A)^2 / sum (rho A)^2). The reference rho is the untruncated pi / mu of
            the token (unbiased for PPO's surrogate, which leaves the distribution of prefixes as it is) or of the whole
            row (unbiased for the policy gradient). By the Cauchy-Schwarz inequality, no gradient with unit second
            moment can deviate by more. This is therefore an upper bound of the bias; it also includes noise that would
            average out. ``bias_sequence`` is None if the reference is based on fewer than ``FEW`` rows.
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


@dataclass(frozen=True)
class TurnShare:
    """Kept share of a group that contains only parts of rows, such as a turn.

    Attributes:
        tokens: response tokens.
        kept_tokens: the share of these tokens that is kept; None if there are no tokens.
    """

    tokens: int
    kept_tokens: float | None


def compute_measures(sums: Sums) -> CorrectionMeasures:
    """Compute the measures of one group of rows."""

    def of(name: str) -> float:
        return float(sums[:, INDEX[name]].sum())

    reference_rows = _over(of("ratio") ** 2, of("ratio_square")) or 0.0
    # A reference that is based on few rows is mostly noise, so no per-sequence bias is reported.
    judges = reference_rows >= FEW
    bias = {name: _root(_over(of(f"distance/{name}"), of(f"reference/{name}"))) for name in REFERENCES}
    shift = {name: _root(_over(_shift(name, sums), of(f"reference/{name}"))) for name in REFERENCES}
    return CorrectionMeasures(
        tokens=round(of("tokens")),
        rows=round(of("rows")),
        kept_tokens=_over(of("kept"), of("tokens")),
        kept_rows=_over(of("kept_rows"), of("rows")),
        ess=_ess(of("applied"), of("applied_square"), of("valid")),
        mismatch_left=_over(of("mismatch/kept"), of("mismatch")),
        lr_scale=_root(_over(of("corrected"), of("uncorrected"))),
        reference_rows=reference_rows,
        bias_token=bias["token"],
        bias_token_systematic=shift["token"],
        bias_sequence=bias["sequence"] if judges else None,
        bias_sequence_systematic=shift["sequence"] if judges else None,
    )


def compute_turn_shares(sums: Sums) -> dict[str, TurnShare]:
    """Compute the kept share by turn number."""
    shares = {}
    for name in TURN_GROUPS:
        tokens, kept = (float(sums[:, INDEX[f"turn/{name}/{column}"]].sum()) for column in ("tokens", "kept"))
        shares[f"turn/{name}"] = TurnShare(round(tokens), _over(kept, tokens))
    return shares


def _shift(reference: str, sums: Sums) -> float:
    """Sum n_c mean_c^2 = S_c^2 / n_c over cells c, which are defined by length bucket and sign of A."""
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


@dataclass(frozen=True)
class CorrectionOutcome:
    """Effect of one correction on the recorded steps.

    Attributes:
        candidate: the correction.
        overall: measures over all rows.
        groups: measures by ``length/<bucket>``, ``advantage/<sign>``, ``staleness/<group>``, for groups with a row.
        turns: shares by ``turn/<number>``, for turns with a token.
        steps: step -> measures over that step.
    """

    candidate: Candidate
    overall: CorrectionMeasures
    groups: Mapping[str, CorrectionMeasures]
    turns: Mapping[str, TurnShare]
    steps: Mapping[int, CorrectionMeasures]


@dataclass(frozen=True)
class Study:
    """The result of a replay.

    Attributes:
        directory: directory of the recording.
        steps: the replayed steps.
        rows, tokens: numbers of rows with a response token, and of response tokens, in these steps.
        outcomes: the outcome of each correction that could be replayed.
        failures: label -> why the correction could not be replayed.
        agreement: agreement between ``outcomes``, in their order.
        fidelity: comparison of the recorded correction's replay with the record.
        notes: limitations of the figures, one sentence each.
    """

    directory: str
    steps: tuple[int, ...]
    rows: int
    tokens: int
    outcomes: tuple[CorrectionOutcome, ...]
    failures: Mapping[str, str]
    agreement: Agreement
    fidelity: Fidelity
    notes: tuple[str, ...]


@dataclass
class RunningOutcome:
    """Accumulated sums of one correction while steps are replayed."""

    candidate: Candidate
    steps: dict[int, Sums] = field(default_factory=dict)
    total: Sums | None = None
    names: tuple[str, ...] = ()

    def add(self, step: int, names: tuple[str, ...], sums: Sums) -> None:
        self.names = names
        # A step is added once for each correction that acted in the step.
        self.steps[step] = sums[0] + self.steps.get(step, 0)
        self.total = sums if self.total is None else self.total + sums

    def build_outcome(self) -> CorrectionOutcome:
        assert self.total is not None, "a step was added"
        groups = {name: compute_measures(sums) for name, sums in zip(self.names, self.total, strict=True)}
        # The group "" contains all rows.
        overall = groups.pop("")
        turns = compute_turn_shares(self.total[0])
        return CorrectionOutcome(
            self.candidate,
            overall,
            {name: group for name, group in groups.items() if group.rows},
            {name: share for name, share in turns.items() if share.tokens},
            {step: compute_measures(sums) for step, sums in self.steps.items()},
        )


SCHEMA = 1


def build_document(study: Study) -> dict[str, Any]:
    """Build the document from plain values."""
    document = {
        "schema": SCHEMA,
        "recording": {
            "directory": study.directory,
            "steps": study.steps,
            "rows": study.rows,
            "tokens": study.tokens,
        },
        "fidelity": {"agrees": _agrees(study.fidelity), "tolerance": TOLERANCE, **vars(study.fidelity)},
        "corrections": [_correction(outcome) for outcome in study.outcomes],
        "agreement": {
            "labels": [outcome.candidate.label for outcome in study.outcomes],
            **{name: matrix.tolist() for name, matrix in vars(study.agreement).items()},
        },
        "failures": study.failures,
        "notes": study.notes,
    }
    return dict(to_plain(document))


def _agrees(fidelity: Fidelity) -> bool | None:
    return fidelity.agrees if fidelity.tokens or not fidelity.agrees else None


def _correction(outcome: CorrectionOutcome) -> dict[str, Any]:
    candidate = outcome.candidate
    return {
        "label": candidate.label,
        "base": candidate.base,
        "point": candidate.point,
        "spec": None if candidate.spec is None else candidate.spec.to_mapping(),
        "overall": outcome.overall,
        "groups": outcome.groups,
        "turns": outcome.turns,
        "steps": outcome.steps,
    }
