"""Replay of one correction over recorded tokens by both training stages, in blocks of rows with similar length.

A token's *gradient weight* is the factor that multiplies grad log pi in the policy gradient, leaving out the factors
that all corrections share: f_t = w_t k_t r_t s. Here w is the weight, k is 1 for a kept token and 0 otherwise, and r is
the base loss's own factor, see ``RecordedLoss`` (1 if there is a weight on pi / mu, because such a loss has no ratio).
s is the row's factor from ``denominator=kept`` or ``nonfinite=excluded``, and otherwise 1. A penalty subtracts 2 c log
r from f A. Without a correction, f is simply r, with the recorded pi_old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_patches.releases import attributes_of

from ...correction import (
    BatchConstants,
    CorrectionSpec,
    SpecError,
    batch_constants,
    proximal_log_prob,
    rollout_stage,
    step_stage,
)
from ...correction.correction_parts import OF_THE_TRAINER, TOLERANCE
from ...correction.decisions import HAS_DENOMINATOR, compute_scale_of_counts
from ...correction.ratios import clamp_and_exp
from ...recording import Rows
from ...recording.recording import read_config

Array = NDArray[np.float64]
SIZE = 2**16
"""Number of positions in a block, including padding; a longer row forms its own block."""
_COLUMNS = ("rollout_log_prob", "old_log_prob", "log_prob", "advantages", "weight")
_SHORTEST = 0.8  # as a share of the longest row of a block


@dataclass(frozen=True)
class Block:
    """B rows of at most W tokens; padding is 0 or False, and -1 for ``turn``, ``version`` and
    ``staleness``.

    Attributes:
        rows: (B,) int64, numbers of the block's rows within the step.
        mask, rollout_log_prob, old_log_prob, log_prob, advantages, weight: (B, W), as recorded.
        rejected_by, turn: (B, W), the recorded bits as int32, and the turn as int16.
        version: (B, W) int32, version of the weights with which the token was sampled; -1 if unknown.
        staleness: (B, W) int64, age of the weights in ``version``, see ``Rows.token_staleness``; -1 if unknown.
    """

    rows: NDArray[np.int64]
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
    return _arrange(rows, np.zeros(1, dtype=np.int64), lambda values, empty: torch.from_numpy(values)[None])


def pad_rows(rows: Rows, chosen: NDArray[np.int64]) -> Block:
    """Pad the rows with these numbers to the length of the longest one."""
    lengths = np.diff(rows.offsets)[chosen]
    column = np.arange(max(int(lengths.max(initial=0)), 1))
    place = column[None, :] < lengths[:, None]
    index = torch.from_numpy(np.where(place, rows.offsets[:-1][chosen][:, None] + column, 0))
    padding = torch.from_numpy(~place)

    def pad(values: NDArray[np.generic], empty: int) -> Tensor:
        if not len(values):
            return torch.full(index.shape, empty, dtype=torch.from_numpy(values).dtype)
        return torch.from_numpy(values)[index].masked_fill_(padding, empty)

    return _arrange(rows, chosen, pad)


def _arrange(rows: Rows, chosen: NDArray[np.int64], arrange: Callable[[NDArray[Any], int], Tensor]) -> Block:
    return Block(
        rows=chosen,
        mask=arrange(rows.response_mask, 0),
        rejected_by=arrange(rows.rejected_by.view(np.int32), 0),  # torch has no bit operations on uint32
        turn=arrange(rows.turn, -1),
        version=arrange(rows.version, -1),
        staleness=arrange(rows.token_staleness, -1),
        **{name: arrange(getattr(rows, name), 0) for name in _COLUMNS},
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


def check_replayable(spec: CorrectionSpec, recorded: CorrectionSpec, rows: Rows) -> None:
    """Raise SpecError if the recorded data are not sufficient to replay ``spec``.

    Args:
        recorded: the correction that was active when ``rows`` were recorded.

    Raises:
        SpecError: pi_old was never computed, or the version of the weights, per row or per token, is unknown.
    """
    if spec.proximal == "recompute" and recorded.proximal not in (*OF_THE_TRAINER, "same_engine"):
        raise SpecError(
            f"correction.proximal=recompute: the run used correction.proximal={recorded.proximal}, so pi_old was "
            f"not computed. Replay with correction.proximal=bypass, loglinear or reuse."
        )
    if spec.proximal == "same_engine" and recorded.proximal != "same_engine":
        if recorded.proximal not in OF_THE_TRAINER:
            raise SpecError(
                f"correction.proximal=same_engine: the run used correction.proximal={recorded.proximal}, so pi_old was "
                "not computed and cannot be compared with mu. Replay with correction.proximal=bypass."
            )
        apart = np.abs(rows.rollout_log_prob.astype(np.float64) - rows.old_log_prob)[rows.response_mask]
        # With this form of the condition, NaN counts as a difference.
        if beyond := int((~(apart <= TOLERANCE)).sum()):
            raise SpecError(
                f"correction.proximal=same_engine: at {beyond} of {len(apart)} tokens mu differs from pi_old by more "
                f"than {TOLERANCE:g} nats, so the run would have stopped. Replay with correction.proximal=bypass."
            )
    if "version" in spec.levels and (unknown := _count_rows(rows, rows.version < 0)):
        reason = f"for {unknown} of {len(rows)} rows, the weight version that sampled each token is unknown"
        raise SpecError(f"level=version: {reason}. Set level=turn or level=sequence.")
    if spec.age_keys and (unknown := _count_rows(rows, rows.token_staleness < 0)):
        reason = f"depends on the age of the weights, which is unknown for {unknown} of {len(rows)} rows"
        raise SpecError(f"correction.{spec.age_keys[0]} {reason}. Replay without this key.")


def _count_rows(rows: Rows, tokens: NDArray[np.bool_]) -> int:
    """Count the rows in which at least one response token is set in ``tokens``, (M,) bool."""
    return len(np.unique(rows.row_of_token[rows.response_mask & tokens]))


def needs_other_advantages(spec: CorrectionSpec, recorded: CorrectionSpec) -> bool:
    """Check whether training with ``spec`` would have computed advantages other than the recorded ones.

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
        recorded: the correction that was active when the rows were recorded.
        constants: constants of the step to which the rows belong.
    """
    old = compute_pi_old(spec, recorded, rows)
    stage = rollout_stage(spec, old_log_prob=old, constants=constants, measure="nothing", **_rollout(rows))
    step = step_stage(spec, stage, log_prob=rows.log_prob, advantages=rows.advantages)
    return Decision(old, stage.valid, step.weight, step.keep, step.rejected)


def count_kept(spec: CorrectionSpec, recorded: CorrectionSpec, rows: Rows, constants: BatchConstants) -> Array:
    """Count, for each row, the tokens that the loss's denominator keeps, (N,).

    These are the tokens that the rollout stage keeps, or, with ``nonfinite=excluded``, the tokens whose mu is finite.

    Args:
        recorded, constants: as in ``decide``.
    """
    if spec.denominator == "original":
        finite = rows.response_mask & np.isfinite(rows.rollout_log_prob)
        return np.bincount(rows.row_of_token[finite], minlength=len(rows)).astype(np.float64)
    kept = np.zeros(len(rows))
    for one in iterate_blocks(rows):
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


_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class RecordedLoss:
    """The run's policy loss, as its card describes it.

    Attributes:
        name: ``policy_loss.loss_mode``; empty if the card does not contain it.
        low, high: PPO's clip range, from 1 - low to 1 + high; None if there is no clip.
        dual: upper clip for negative advantages (dual-clip PPO, Ye et al. 2020); None for no such clip.
        aggregation: ``loss_agg_mode``; empty if the card does not contain it.
        mini_batch_rows: rows of a mini-batch over all ranks; 0 if unknown.
        sampled: whether only a share of the rows was recorded.
    """

    name: str = ""
    low: float | None = None
    high: float | None = None
    dual: float | None = None
    aggregation: str = ""
    mini_batch_rows: int = 0
    sampled: bool = False

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> RecordedLoss:
        """Read the loss from a recording's card. Batches are split into mini-batches as in ``batch.plan``."""
        name, mode = (read_config(card, f"{_ACTOR}.{key}") for key in ("policy_loss.loss_mode", "loss_agg_mode"))
        if isinstance(mode, str) and isinstance(release := card.get("release"), str):
            mode = attributes_of(release).find_policy_aggregation(str(name), mode)
        both, low, high, dual = (
            _read_number(card, f"{_ACTOR}.clip_ratio{side}") if name == "vanilla" else None
            for side in ("", "_low", "_high", "_c")
        )
        prompts = _read_number(card, f"{_ACTOR}.ppo_mini_batch_size") or 0
        share = _read_number(card, "offpolicy.record.share")
        return cls(
            name=name if isinstance(name, str) else "",
            # For a side without its own clip, verl uses clip_ratio.
            low=both if low is None else low,
            high=both if high is None else high,
            dual=dual,
            aggregation=mode if isinstance(mode, str) else "",
            mini_batch_rows=int(prompts * (_read_number(card, "actor_rollout_ref.rollout.n") or 0)),
            sampled=share is not None and share < 1,
        )

    def compute_factor(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Compute r = pi / pi_old, 0 where the clip stops the gradient; 1 under ``gpg``, whose loss contains no ratio.

        PPO's clip stops the gradient at r > 1 + high if A > 0, and at r < 1 - low if A < 0 (Schulman et al. 2017). The
        dual clip stops the gradient at r > dual if A < 0.

        Args:
            log_ratio: (B, W) float64, log(pi / pi_old).
            advantages: (B, W).
        """
        if self.name == "gpg":
            return torch.ones_like(log_ratio)
        ratio = clamp_and_exp(log_ratio)
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
        if self.high is not None:
            clipped |= (advantages > 0) & (ratio > 1 + self.high)
        if self.low is not None:
            clipped |= (advantages < 0) & (ratio < 1 - self.low)
        if self.dual is not None:
            clipped |= (advantages < 0) & (ratio > self.dual)
        return ratio.masked_fill_(clipped, 0.0)

    @property
    def note(self) -> str:
        """A sentence about a base loss that is unknown or not modelled; empty otherwise."""
        if self.name in ("vanilla", "gpg"):
            return ""
        if not self.name:
            return "The recording does not name the base loss, so pi / pi_old is used without a clip."
        return f"The ratio and clip of the base loss {self.name} are not modelled; pi / pi_old is used without a clip."

    def explain_unknown(self, rows: Rows) -> str:
        """Explain why ``compute_scale`` cannot be used for ``rows``; empty if it can.

        Args:
            rows: all recorded rows of one step's updates under one correction.
        """
        if self.sampled:
            return "only a sample of the rows was recorded"
        if not (self.aggregation and self.mini_batch_rows):
            return "the recording does not contain all of loss_agg_mode, ppo_mini_batch_size and rollout.n"
        if self.aggregation not in HAS_DENOMINATOR:
            return f"loss_agg_mode={self.aggregation} divides by an unknown count"
        _, counts = np.unique(rows.mini_batch, return_counts=True)
        if (rows.mini_batch < 0).any() or (counts != self.mini_batch_rows).any():
            return f"some recorded mini-batches do not have the {self.mini_batch_rows} rows of a training mini-batch"
        return ""

    def compute_scale(self, rows: Rows, kept: Array) -> Array:
        """Compute the factor of each row, (N,) float64; see ``correction.decisions.compute_scale_of_counts``.

        Args:
            rows: rows for which ``explain_unknown`` is empty.
            kept: (N,) number of response tokens that the correction keeps in each row.
        """
        _, mini_batch = np.unique(rows.mini_batch, return_inverse=True)
        return compute_scale_of_counts(
            self.aggregation,
            tokens=torch.from_numpy(rows.length.astype(np.float64)),
            kept=torch.from_numpy(kept),
            mini_batch=torch.from_numpy(mini_batch.astype(np.int64)),
            mini_batch_rows=self.mini_batch_rows,
        ).numpy()


def _read_number(card: Mapping[str, Any], key: str) -> float | None:
    """Read a number from the configuration in a card; None if it is missing or not a number."""
    value = read_config(card, key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
