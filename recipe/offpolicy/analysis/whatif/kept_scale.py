"""Loss scale N / (N - R) of ``denominator=kept``, from the mini-batches of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_patches.releases import attributes_of

from ...correction.denominator import HAS_DENOMINATOR, compute_scale_of_counts
from ...recording import Rows


@dataclass(frozen=True)
class DenominatorCounts:
    """Settings of a run that decide what its loss divides by, as its card says.

    Attributes:
        mode: the aggregation of the policy loss, by ``actor.loss_agg_mode``; None where the card does not say.
        mini_batch_rows: rows of a mini-batch over all ranks; None likewise.
        sampled: only a share of the rows was recorded.
    """

    mode: str | None = None
    mini_batch_rows: int | None = None
    sampled: bool = False

    @classmethod
    def from_card(cls, card: Mapping[str, Any], *, sampled: bool) -> DenominatorCounts:
        """Read the settings from a recording's card; mini-batches are split as ``batch.plan`` says."""
        mode = _at(card, "actor", "loss_agg_mode")
        prompts, responses = _at(card, "actor", "ppo_mini_batch_size"), _at(card, "rollout", "n")
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (prompts, responses))
        if isinstance(mode, str) and isinstance(release := card.get("release"), str):
            loss_mode = str(_at(card, "actor", "policy_loss", "loss_mode"))
            mode = attributes_of(release).find_policy_aggregation(loss_mode, mode)
        return cls(mode if isinstance(mode, str) else None, prompts * responses if whole else None, sampled)

    def explain_unknown(self, rows: Rows) -> str:
        """Say why N and R of the mini-batches of ``rows`` are not known; empty where they are.

        Args:
            rows: all that is recorded of the updates under one correction, of one step.
        """
        if self.sampled:
            return "only a sample of the rows was recorded"
        if self.mode is None or self.mini_batch_rows is None:
            return "the recording does not say the run's loss_agg_mode, ppo_mini_batch_size and rollout.n"
        if self.mode not in HAS_DENOMINATOR:
            return f"loss_agg_mode={self.mode} divides by no count that is known here"
        _, counts = np.unique(rows.mini_batch, return_counts=True)
        if (rows.mini_batch < 0).any() or (counts != self.mini_batch_rows).any():
            return f"not every mini-batch has the {self.mini_batch_rows} rows recorded that the run trains on at once"
        return ""

    def compute_scale(self, rows: Rows, kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the factor of each row, (N,) float64; see ``correction.denominator.compute_scale_of_counts``.

        Args:
            rows: for which ``explain_unknown`` is empty.
            kept: (N,) response tokens of each row that the correction keeps.
        """
        assert self.mode is not None, "explain_unknown is empty"
        assert self.mini_batch_rows is not None, "explain_unknown is empty"
        _, mini_batch = np.unique(rows.mini_batch, return_inverse=True)
        return compute_scale_of_counts(
            self.mode,
            tokens=torch.from_numpy(rows.length.astype(np.float64)),
            kept=torch.from_numpy(kept),
            mini_batch=torch.from_numpy(mini_batch.astype(np.int64)),
            mini_batch_rows=self.mini_batch_rows,
        ).numpy()


def _at(card: Mapping[str, Any], *path: str) -> Any:
    """Read a value below ``actor_rollout_ref`` of the card's configuration; None where it is missing."""
    node: Any = card
    for key in ("config", "actor_rollout_ref", *path):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
