"""Replay of one correction over recorded tokens by both training stages, in blocks of rows with similar length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...correction import (
    BatchConstants,
    CorrectionSpec,
    SpecError,
    batch_constants,
    proximal_log_prob,
    rollout_stage,
    step_stage,
)
from ...correction.proximal import OF_THE_TRAINER, TOLERANCE
from ...recording import Rows

SIZE = 2**16
"""Number of positions in a block, including padding; a longer row forms its own block."""
_COLUMNS = ("rollout_log_prob", "old_log_prob", "log_prob", "advantages", "weight")
_SHORTEST = 0.8  # as a share of the longest row of a block


@dataclass(frozen=True)
class Block:
    """B rows of at most W tokens; padding is 0 or False, and -1 for ``turn``.

    Attributes:
        rows: (B,) int64, numbers of the block's rows within the step.
        place: (B, W) bool, whether a token was recorded at this position.
        mask, rollout_log_prob, old_log_prob, log_prob, advantages, weight: (B, W), as recorded.
        rejected_by, turn: (B, W), the recorded bits as int32, and the turn as int16.
        version: (B, W) int32, version of the weights with which the token was sampled; -1 if unknown.
        staleness: (B, W) int64, age of the weights in ``version``, see ``Rows.token_staleness``; -1 if unknown.
    """

    rows: NDArray[np.int64]
    place: Tensor
    mask: Tensor
    rollout_log_prob: Tensor
    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    weight: Tensor
    rejected_by: Tensor
    turn: Tensor
    version: Tensor
    staleness: Tensor


def iterate_blocks(rows: Rows, size: int = SIZE) -> Iterator[Block]:
    """Yield blocks that together contain every row once, starting with the longest rows."""
    lengths = np.diff(rows.offsets)
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    start = 0
    while start < len(order):
        widest = max(int(ordered[start]), 1)
        # Rows are sorted by descending length; the first row that would leave too much padding starts the next block.
        stop = int(np.searchsorted(-ordered, -_SHORTEST * widest, side="right"))
        stop = min(max(stop, start + 1), start + max(size // widest, 1))
        yield pad_rows(rows, order[start:stop])
        start = stop


def concatenate_rows(rows: Rows) -> Block:
    """Concatenate all tokens into one long row without padding, for statistics that ignore rows."""
    columns = {name: getattr(rows, name) for name in _COLUMNS}
    return Block(
        rows=np.zeros(1, dtype=np.int64),
        place=torch.ones(1, rows.tokens, dtype=torch.bool),
        mask=torch.from_numpy(rows.response_mask)[None],
        rejected_by=torch.from_numpy(rows.rejected_by.view(np.int32))[None],
        turn=torch.from_numpy(rows.turn)[None],
        version=torch.from_numpy(rows.version)[None],
        staleness=torch.from_numpy(rows.token_staleness)[None],
        **{name: torch.from_numpy(values)[None] for name, values in columns.items()},
    )


def pad_rows(rows: Rows, chosen: NDArray[np.int64]) -> Block:
    """Pad the rows with these numbers to the length of the longest one."""
    lengths = np.diff(rows.offsets)[chosen]
    column = np.arange(max(int(lengths.max(initial=0)), 1))
    place = column[None, :] < lengths[:, None]
    index = torch.from_numpy(np.where(place, rows.offsets[:-1][chosen][:, None] + column, 0))
    there = torch.from_numpy(place)

    def padded(values: NDArray[np.generic], empty: int = 0) -> Tensor:
        if not len(values):
            return torch.full(index.shape, empty, dtype=torch.from_numpy(values).dtype)
        return torch.from_numpy(values)[index].masked_fill_(~there, empty)

    version = padded(rows.version, -1)
    step, oldest = (torch.from_numpy(column[chosen])[:, None] for column in (rows.step, rows.oldest_version))
    sampled_by = torch.where(version < 0, oldest, version)
    return Block(
        rows=chosen,
        place=there,
        mask=padded(rows.response_mask),
        rejected_by=padded(rows.rejected_by.view(np.int32)),  # torch has no bit operations on uint32
        turn=padded(rows.turn, -1),
        version=version,
        staleness=torch.where(sampled_by < 0, -1, (step - 1 - sampled_by).clamp(min=0)),
        **{name: padded(getattr(rows, name)) for name in _COLUMNS},
    )


@dataclass(frozen=True)
class Decision:
    """Decision of one correction on one block.

    Attributes:
        old_log_prob: (B, W), log pi_old as the correction uses it.
        valid: (B, W) bool, valid tokens of the rollout stage.
        weight: (B, W), before masks.
        keep: (B, W) bool.
        rejected: rejecting part -> (B, W) bool, meaningless outside ``valid``.
    """

    old_log_prob: Tensor
    valid: Tensor
    weight: Tensor
    keep: Tensor
    rejected: dict[str, Tensor]


def check_gradient_known(spec: CorrectionSpec) -> None:
    """Raise SpecError if scores are centred, because centring changes gradients but not weights or kept tokens."""
    if spec.centering is not None:
        raise SpecError(
            f"correction.centering={spec.centering}: a recording contains no log-probs of tokens that were not "
            "sampled, so the centring term is unknown. Replay with correction.centering=null."
        )


def check_replayable(spec: CorrectionSpec, recorded: CorrectionSpec, rows: Rows) -> None:
    """Raise SpecError if the recorded data are not sufficient to replay ``spec``.

    Args:
        recorded: the correction that acted when ``rows`` were recorded.

    Raises:
        SpecError: pi_old was never computed, or the version of the weights, per row or per token, is unknown.
    """
    if spec.proximal == "recompute" and recorded.proximal not in (*OF_THE_TRAINER, "same_engine"):
        raise SpecError(
            f"correction.proximal=recompute: the run used correction.proximal={recorded.proximal}, so pi_old was "
            f"not computed. Replay with correction.proximal=bypass, loglinear or reuse."
        )
    if spec.proximal == "same_engine" and recorded.proximal != "same_engine":
        _check_same_engine(recorded, rows)
    if "version" in spec.levels and (unknown := _count_rows(rows, rows.version < 0)):
        raise SpecError(
            f"level=version: for {unknown} of {len(rows)} rows it is unknown which version of the weights sampled "
            f"each token. Set level=turn or level=sequence."
        )
    if spec.age_keys and (unknown := _count_rows(rows, rows.token_staleness < 0)):
        key = spec.age_keys[0]
        raise SpecError(
            f"correction.{key} depends on the age of the weights: for {unknown} of {len(rows)} rows it is unknown "
            f"which version sampled them. Replay without this key."
        )


def _check_same_engine(recorded: CorrectionSpec, rows: Rows) -> None:
    """Check that a run with ``proximal=same_engine`` would not have stopped at these rows.

    Raises:
        SpecError: the run would have stopped, or pi_old was never computed.
    """
    if recorded.proximal not in OF_THE_TRAINER:
        raise SpecError(
            f"correction.proximal=same_engine: the run used correction.proximal={recorded.proximal}, so pi_old was "
            "not computed, and mu cannot be compared with it. Replay with correction.proximal=bypass."
        )
    apart = np.abs(rows.rollout_log_prob.astype(np.float64) - rows.old_log_prob)[rows.response_mask]
    # The condition is written so that NaN counts as a difference.
    if beyond := int((~(apart <= TOLERANCE)).sum()):
        raise SpecError(
            f"correction.proximal=same_engine: at {beyond} of {len(apart)} tokens mu differs from pi_old by more than "
            f"{TOLERANCE:g} nats, so the run would have stopped. Replay with correction.proximal=bypass, which uses mu "
            f"as pi_old."
        )


def _count_rows(rows: Rows, tokens: NDArray[np.bool_]) -> int:
    """Count the rows in which at least one response token is set in ``tokens``, (M,) bool."""
    return len(np.unique(rows.row_of_token[rows.response_mask & tokens]))


def needs_other_advantages(spec: CorrectionSpec, recorded: CorrectionSpec) -> bool:
    """Check whether training with ``spec`` would have used advantages that differ from the recorded ones.

    ``baseline=exclude`` computes advantages from the rows that the correction keeps.
    """
    if spec.baseline == recorded.baseline == "include":
        return False
    return (spec.baseline, spec.all_weights, spec.masks) != (recorded.baseline, recorded.all_weights, recorded.masks)


def compute_constants(spec: CorrectionSpec, recorded: CorrectionSpec, rows: Rows) -> BatchConstants:
    """Compute the batch-level constants of ``spec``, with the step's rows as one batch."""
    if not spec.needs_constants:
        return BatchConstants()
    normalised_rows = spec.normalized is not None and spec.normalized.level != "token"
    # Tokens can be sorted and averaged without rows, and a padded step would consist mostly of padding.
    whole = pad_rows(rows, np.arange(len(rows))) if normalised_rows else concatenate_rows(rows)
    return batch_constants(spec, old_log_prob=compute_pi_old(spec, recorded, whole), **_rollout(whole))


def decide(spec: CorrectionSpec, recorded: CorrectionSpec, rows: Block, constants: BatchConstants) -> Decision:
    """Run both stages on a block.

    Args:
        recorded: the correction that acted when the rows were recorded.
        constants: constants of the step to which the rows belong.
    """
    old = compute_pi_old(spec, recorded, rows)
    stage = rollout_stage(spec, old_log_prob=old, constants=constants, measure="nothing", **_rollout(rows))
    step = step_stage(spec, stage, log_prob=rows.log_prob, advantages=rows.advantages)
    return Decision(old, stage.valid, step.weight, step.keep, step.rejected)


def count_kept_tokens(
    spec: CorrectionSpec, recorded: CorrectionSpec, rows: Rows, constants: BatchConstants, size: int = SIZE
) -> NDArray[np.float64]:
    """Count, for each row, the tokens that the loss's denominator keeps, (N,).

    These are the tokens that the rollout stage keeps, or, with ``nonfinite=excluded``, the tokens whose mu is finite.

    Args:
        recorded, constants: as in ``decide``.
        size: positions in a padded block, see ``iterate_blocks``.
    """
    kept = np.zeros(len(rows))
    if spec.denominator == "original":
        finite = rows.response_mask & np.isfinite(rows.rollout_log_prob)
        return np.bincount(rows.row_of_token[finite], minlength=len(rows)).astype(np.float64)
    for one in iterate_blocks(rows, size):
        old = compute_pi_old(spec, recorded, one)
        stage = rollout_stage(spec, old_log_prob=old, constants=constants, measure="nothing", **_rollout(one))
        kept[one.rows] = stage.keep.sum(-1).numpy()
    return kept


def compute_pi_old(spec: CorrectionSpec, recorded: CorrectionSpec, rows: Block) -> Tensor:
    """Compute log pi_old for ``spec``, (B, W); the recorded log pi_old is used if its source is the same."""
    if (spec.proximal, spec.alpha) == (recorded.proximal, recorded.alpha):
        return rows.old_log_prob
    return proximal_log_prob(
        spec.proximal,
        spec.alpha,
        old_log_prob=rows.old_log_prob,
        rollout_log_prob=rows.rollout_log_prob,
        log_prob=rows.log_prob,
        ages=rows.staleness,
    )


def _rollout(rows: Block) -> dict[str, Any]:
    return {
        "rollout_log_prob": rows.rollout_log_prob,
        "response_mask": rows.mask,
        "segment_ids": rows.turn,
        "versions": rows.version,
        "staleness": rows.staleness,
    }
