"""Sums over the rows of a step, in float64, that describe one correction's effect on the gradient.

A token's *gradient weight* is the factor that multiplies grad log pi in the policy gradient, leaving out the factors
that all corrections share: f_t = w_t k_t r_t s. Here w is the weight, k is 1 for a kept token and 0 otherwise, and r is
the base loss's own factor, see ``BaseLoss`` (1 if there is a weight on pi / mu, because such a loss has no ratio). s is
the row's factor from ``denominator=kept`` or ``nonfinite=excluded``, see ``study``; it is 1 otherwise. If there is also
a penalty, ``compute_pull`` is subtracted from f A. Without a correction, f is simply r, with the recorded pi_old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...correction import CorrectionSpec
from ...correction.ratios import EXP_CLAMP, clamp_and_exp, compute_log_ratio, find_valid_tokens
from ...correction.statistics import BUCKETS, SIGNS, STALENESS
from ...recording import Rows
from ...recording.recording import read_config
from .replay import Block, Decision


@dataclass(frozen=True)
class BaseLoss:
    """The run's ``actor.policy_loss.loss_mode`` and clips, as recorded.

    Attributes:
        name: the mode; empty if the recording does not contain it.
        low, high: PPO's clip range, from 1 - low to 1 + high; None if there is no clip.
        dual: upper clip for negative advantages (dual-clip PPO, Ye et al. 2020); None for no such clip.
    """

    name: str = ""
    low: float | None = None
    high: float | None = None
    dual: float | None = None

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> BaseLoss:
        """Read the base loss from a recording's card; clips are read only for ``vanilla``."""
        name = read_config(card, "actor_rollout_ref.actor.policy_loss.loss_mode")
        if not isinstance(name, str):
            return cls()
        if name != "vanilla":
            return cls(name)
        both, low, high, dual = (
            read_config(card, f"actor_rollout_ref.actor.clip_ratio{side}") for side in ("", "_low", "_high", "_c")
        )
        # For a side without a clip of its own, verl uses clip_ratio.
        low, high = (both if side is None else side for side in (low, high))
        return cls(name, _number(low), _number(high), _number(dual))

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
        return f"Base loss {self.name}: its own ratio and clip are not modelled; pi / pi_old is used without a clip."


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


TURN_GROUPS = ("is0", "is1", "is2", "ge3")
"""Turns of a row by number, from 0; their names are formed like the names of the staleness groups."""
REFERENCES = ("token", "sequence")
CELLS = tuple(f"{reference}/{sign}" for reference in REFERENCES for sign in SIGNS)

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
    *(f"shift/{cell}" for cell in CELLS),  # sum of (f - rho) A over tokens of A of one sign
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
        counted: (B, W) float64 of 0 and 1, 1 for tokens at which gradient weights are compared, that is, where mu,
            pi_old, pi and A are all finite.
        advantages: (B, W) float64, 0 wherever ``counted`` is 0.
        base_loss: base loss of the run.
        base_factor: (B, W) float64, factor of the base loss with the recorded pi_old.
        references: the factor rho of each reference: pi / mu of the token, (B, W), or of all the row's tokens, (B, 1).
        mismatch: (B, W) float64, k3 = rho - 1 - log rho of each token, the sum of which estimates KL(mu, pi); never
            below 0.
    """

    block: Block
    counted: Tensor
    advantages: Tensor
    base_loss: BaseLoss
    base_factor: Tensor
    references: dict[str, Tensor]
    mismatch: Tensor

    @cached_property
    def ideal(self) -> dict[str, Tensor]:
        """rho A by reference, (B, W)."""
        return {name: rho * self.advantages for name, rho in self.references.items()}

    @cached_property
    def uncorrected(self) -> Tensor:
        """(B, W), r A."""
        return self.base_factor * self.advantages

    @cached_property
    def signs(self) -> tuple[Tensor, Tensor]:
        """(B, W) float64 of 0 and 1: tokens of positive and of negative advantage."""
        return (self.advantages > 0).double(), (self.advantages < 0).double()

    @cached_property
    def turns(self) -> list[Tensor]:
        """(B, W) bool for each of ``TURN_GROUPS``; empty if no row has a second turn."""
        turn, mask = self.block.turn, self.block.mask
        if not bool((turn > 0).any()):
            return []
        return [mask & (turn >= i if name.startswith("ge") else turn == i) for i, name in enumerate(TURN_GROUPS)]

    @cached_property
    def shared(self) -> dict[str, Tensor]:
        """Columns that do not depend on the correction, (B,) each."""
        tokens = self.block.mask.sum(-1).double()
        columns = {
            "tokens": tokens,
            "rows": (tokens > 0).double(),
            "uncorrected": _dot(self.uncorrected, self.uncorrected),
            "mismatch": self.mismatch.sum(-1),
        }
        # A row without a counted token has the ratio exp(0) = 1, which must not be counted.
        ratio = self.references["sequence"][:, 0] * self.counted.amax(-1)
        columns |= {"ratio": ratio, "ratio_square": ratio.square()}
        columns |= {f"reference/{name}": _dot(ideal, ideal) for name, ideal in self.ideal.items()}
        columns |= {f"count/{name}": sign.sum(-1) for name, sign in zip(SIGNS, self.signs, strict=True)}
        if not self.turns:
            return columns | {"turn/is0/tokens": tokens}
        by_turn = zip(TURN_GROUPS, self.turns, strict=True)
        return columns | {f"turn/{name}/tokens": turn.sum(-1).double() for name, turn in by_turn}


def build_reference_block(block: Block, base_loss: BaseLoss) -> ReferenceBlock:
    """Build the quantities with which a block's corrections are compared."""
    log_probs = (block.rollout_log_prob, block.old_log_prob, block.log_prob)
    counted = find_valid_tokens(block.mask, *log_probs, block.advantages)
    full = compute_log_ratio(block.log_prob, block.rollout_log_prob, counted)
    advantages = torch.where(counted, block.advantages, 0.0).double()
    return ReferenceBlock(
        block=block,
        counted=counted.double(),
        advantages=advantages,
        base_loss=base_loss,
        base_factor=base_loss.compute_factor(
            compute_log_ratio(block.log_prob, block.old_log_prob, counted), advantages
        ),
        references={"token": clamp_and_exp(full), "sequence": clamp_and_exp(full.sum(-1, keepdim=True))},
        mismatch=torch.expm1(full.clamp(-EXP_CLAMP, EXP_CLAMP)) - full,
    )


def compute_gradient_weight(
    spec: CorrectionSpec, by: Decision, of: ReferenceBlock, scale: NDArray[np.float64] | None = None
) -> Tensor:
    """Compute f_t, as defined in the module docstring: (B, W) float64, 0 wherever ``of.counted`` is 0.

    Args:
        scale: (N,) factor s of each row in the step; None if it is 1 for all rows.
    """
    applied = torch.where(by.keep, by.weight, 0.0).double() * of.counted
    if scale is not None:
        applied = applied * torch.from_numpy(scale[of.block.rows])[:, None]
    # A weight on pi / mu replaces the base loss's ratio.
    if spec.weighs_full_ratio:
        return applied
    # The factor depends only on pi_old, so it is computed once per block for each pi_old.
    if by.old_log_prob is of.block.old_log_prob:
        return applied * of.base_factor
    log_r = compute_log_ratio(of.block.log_prob, by.old_log_prob, of.counted.bool())
    return applied * of.base_loss.compute_factor(log_r, of.advantages)


def compute_pull(
    spec: CorrectionSpec, by: Decision, of: ReferenceBlock, scale: NDArray[np.float64] | None = None
) -> Tensor:
    """Compute 2 c log r, which a penalty subtracts from f_t A_t: (B, W) float64, 0 wherever ``of.counted`` is 0.

    Args:
        scale: as in ``compute_gradient_weight``; with ``denominator=kept`` it applies only to the policy term.
    """
    assert spec.penalty is not None
    other = of.block.rollout_log_prob if spec.penalty.ratio == "full" else by.old_log_prob
    pull = 2 * spec.penalty.coefficient * compute_log_ratio(of.block.log_prob, other, of.counted.bool())
    if scale is None or spec.nonfinite == "counted":
        return pull
    return pull * torch.from_numpy(scale[of.block.rows])[:, None]


def compute_row_sums(by: Decision, of: ReferenceBlock, weighed: Tensor) -> NDArray[np.float64]:
    """Compute the sums of each row: (B, len(COLUMNS)).

    Args:
        weighed: (B, W) f A, see ``compute_gradient_weight``.
    """
    applied = torch.where(by.keep, by.weight, 0.0).double()
    valid, kept, total = by.valid.sum(-1).double(), by.keep.sum(-1).double(), applied.sum(-1)
    columns = of.shared | {
        "valid": valid,
        "kept": kept,
        "kept_rows": (kept > 0).double(),
        "applied": total,
        "applied_square": _dot(applied, applied),
        "corrected": _dot(weighed, weighed),
        "mismatch/kept": torch.where(by.keep, of.mismatch, 0.0).sum(-1),
    }
    for reference, ideal in of.ideal.items():
        gap = weighed - ideal
        columns[f"distance/{reference}"] = _dot(gap, gap)
        for sign, where in zip(SIGNS, of.signs, strict=True):
            columns[f"shift/{reference}/{sign}"] = _dot(gap, where)
    if of.turns:
        for name, turn in zip(TURN_GROUPS, of.turns, strict=True):
            columns[f"turn/{name}/kept"] = (turn & by.keep).sum(-1).double()
    else:
        columns["turn/is0/kept"] = kept
    table = torch.zeros(len(valid), len(COLUMNS), dtype=torch.float64)
    for name, values in columns.items():
        table[:, INDEX[name]] = values
    return table.numpy()


@dataclass(frozen=True)
class Grouping:
    """Groups of a step's N rows; there are G groups, and each is split by length into L buckets.

    Attributes:
        names: names of the groups; the group "" contains all rows.
        member: (G L, N) float64 of 0 and 1.
    """

    names: tuple[str, ...]
    member: NDArray[np.float64]

    def sum_rows(self, table: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum rows by group: (G, L, columns) from (N, columns)."""
        # The multiplication uses torch; see ``jobs.prepare_process``.
        sums = torch.from_numpy(self.member) @ torch.from_numpy(table)
        return sums.numpy().reshape(len(self.names), -1, table.shape[1])


def build_grouping(rows: Rows) -> Grouping:
    """Group rows as ``correction.telemetry`` does.

    Length counts valid tokens, whose mu and pi_old are finite. The sign is that of the sum of advantages over the row's
    valid tokens. Staleness is that of the row's first token. The last of the L buckets contains the rows without a
    valid token.
    """
    valid = rows.response_mask & np.isfinite(rows.rollout_log_prob) & np.isfinite(rows.old_log_prob)
    length = _by_row(valid.astype(np.float64), rows)
    advantage = _by_row(np.where(valid, np.nan_to_num(rows.advantages, nan=0.0, posinf=0.0, neginf=0.0), 0.0), rows)
    limits = [most for most in BUCKETS.values() if most is not None]
    # Rows without a valid token have their own bucket, so that totals stay complete.
    bucket = np.where(length > 0, np.searchsorted(limits, length, side="left"), len(BUCKETS))
    groups: dict[str, NDArray[np.bool_]] = {"": np.ones(len(rows), dtype=bool)}
    groups |= {f"length/{name}": bucket == place for place, name in enumerate(BUCKETS)}
    groups |= {f"advantage/{name}": sign for name, sign in zip(SIGNS, (advantage > 0, advantage < 0), strict=True)}
    age = rows.staleness
    for index, name in enumerate(STALENESS):
        groups[f"staleness/{name}"] = age >= index if name.startswith("ge") else age == index
    # All sums over groups are computed by one matrix product with the (N, columns) table.
    cells = bucket[None, :] == np.arange(len(BUCKETS) + 1)[:, None]
    member = np.stack(list(groups.values()))[:, None, :] & cells[None, :, :]
    return Grouping(tuple(groups), member.reshape(-1, len(rows)).astype(np.float64))


def _by_row(values: NDArray[np.float64], rows: Rows) -> NDArray[np.float64]:
    ends = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return ends[rows.offsets[1:]] - ends[rows.offsets[:-1]]


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Sum a product over each row, without a temporary array of the same size; torch's einsum takes twice as long."""
    return torch.from_numpy(np.einsum("bw,bw->b", one.numpy(), other.numpy()))
