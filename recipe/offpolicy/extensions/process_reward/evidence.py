"""Proof of process rewards: credit reaches the correct tokens, and the workers' advantages equal the trainer's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...proof.rollout_log_probs import Column, check_arrived, check_zeros
from ...proof.token_alignment import AlignmentChecker, tally_agreements
from ...proof.verify import LivenessError
from ..advantage_proof import AdvantageWorker
from .advantages import SECTION, UTILITY
from .prefix_scorer import RowValues
from .row_utilities import BatchUtilities, move_utility


@dataclass(frozen=True)
class ProcessWorker(AdvantageWorker):
    """A worker part without settings, because advantages are shaped in the trainer, and the loss is verl's."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {UTILITY: "increase in log p(answer) over the episode that ends here, in nats; NaN elsewhere"}


MOVED_ROWS = 8
"""Largest number of rows in which a utility is moved at the first update."""
COMPARED = 8
"""Number of prefixes that the trainer's own forward pass scores again at the first step."""
TOLERANCES = {"float32": 1e-3, "fp32": 1e-3}
COARSE = 0.05
"""Nats by which values may differ from the trainer's, depending on the rollout's dtype; ``COARSE`` for 16 bits."""
COLUMN = Column(f"{SECTION}: values of prefixes", "Check the rollout engine's log.", LivenessError, 0.0)
Scored = tuple[list[int], list[int], int]
"""Ids of prompt and response, and the number of last tokens that form the answer."""


def check_moved(found: BatchUtilities, deal: Callable[[Tensor], Tensor], rows: Sequence[int]) -> int:
    """Check that the position of each utility decides which tokens are credited.

    Args:
        found: utilities of the batch.
        deal: computes process advantages (n, T) from utilities (n, T), as the run does.
        rows: rows to check, in this order.

    Returns:
        Number of checked rows, at most ``MOVED_ROWS``; rows with a single episode, or with no episode that counts,
        cannot be checked.

    Raises:
        LivenessError: utilities were moved, but the advantages did not change.
    """
    dealt, seen = deal(found.values), 0
    for row in rows:
        moved = move_utility(found, row)
        if moved is None or not dealt[row].any():
            continue
        if torch.equal(deal(moved)[row], dealt[row]):
            raise LivenessError(
                f"{SECTION}: a utility of sequence {row} was moved to another episode, but no advantage changed: the "
                f"utilities of a sequence are summed before they reach its tokens."
            )
        seen += 1
        if seen == MOVED_ROWS:
            break
    return seen


def check_penalty(found: BatchUtilities, waste: Tensor, taken: Tensor, penalty: float, mask: Tensor) -> None:
    """Check token by token that the penalty is subtracted once for each wasted episode that ends later.

    Args:
        waste: (n, T) bool, last tokens of wasted episodes.
        taken: (n, T), the amount by which the penalty lowers advantages.
        penalty: penalty of one episode.
        mask: (n, T) bool, response tokens.

    Raises:
        LivenessError: a token's advantage is lowered by a different amount.
    """
    for row in waste.any(-1).nonzero()[:MOVED_ROWS, 0].tolist():
        ends = [end for end in found.rows[row].ends if waste[row, end - 1]]
        for token in mask[row].nonzero()[:, 0].tolist():
            wanted = penalty * sum(token < end for end in ends)
            if not abs(float(taken[row, token]) - wanted) <= 1e-6 * (1 + wanted):
                raise LivenessError(
                    f"{SECTION}.waste.penalty: the penalty lowers the advantage of token {token} of sequence {row} by "
                    f"{float(taken[row, token]):.6g} "
                    f"instead of {wanted:.6g}."
                )


def choose_prefixes(rows: Sequence[RowValues], floor: float, seed: int) -> list[tuple[int, int]]:
    """Choose ``COMPARED`` random pairs (row, number of the value) whose values are not at the floor."""
    there = [
        (row, number) for row, each in enumerate(rows) for number, value in enumerate(each.values) if value > floor
    ]
    return random.Random(seed).sample(there, min(COMPARED, len(there)))


def build_scored_row(each: RowValues, number: int, prompt: list[int], response: list[int]) -> Scored:
    """Build the row (prompt, response, answer tokens) whose last log-probs average to the value with this number."""
    end = each.ends[number - 1] if number else 0
    ids, count = each.answers[each.best[number]]
    return prompt, [*response[:end], *ids], count


def check_column(rows: Sequence[RowValues], floor: float) -> bool:
    """Check that the values of a batch can be log-probs; values at the floor are ignored.

    Returns:
        Whether all values are exactly 0, which the trainer's own forward pass must confirm.

    Raises:
        LivenessError: a value is not finite or is above 0, or all values are the same number.
    """
    values = torch.tensor([[value for row in rows for value in row.values]])
    there = values != floor
    check_arrived(values, there, COLUMN)
    return bool(there.any()) and not values[there].any()


def check_related(values: Sequence[float], own: Sequence[float], checker: AlignmentChecker) -> None:
    """Check values from an engine with older weights: engine and trainer must rank prefixes in a similar order.

    Raises:
        LivenessError: all values are 0, although the trainer is not certain of the answers.
        AlignmentError: over enough prefixes, the rankings agree no better than by chance.
    """
    engine, trainer = torch.tensor(values)[:, None], torch.tensor(own)[:, None]
    there = torch.ones_like(engine, dtype=torch.bool)
    check_zeros(engine, trainer, there, COLUMN)
    checker.judge(tally_agreements(trainer, engine, there))


def average_answers(log_probs: Sequence[Sequence[float]], counts: Sequence[int]) -> list[float]:
    """Compute the mean log-prob of each answer, whose tokens are the last ``counts`` of a row."""
    return [math.fsum(each[-count:]) / count for each, count in zip(log_probs, counts, strict=True)]


def check_forward(values: Sequence[float], own: Sequence[float], tolerance: float) -> float:
    """Check values of the rollout engine against the trainer's own forward pass.

    Args:
        values: V of each prefix.
        own: V of the same prefixes, computed by the trainer.
        tolerance: largest accepted difference, in nats.

    Returns:
        The largest difference, in nats.

    Raises:
        LivenessError: the values differ by more than the tolerance.
    """
    apart = [abs(one - other) for one, other in zip(values, own, strict=True)]
    # NaN counts as the worst value.
    worst = max(range(len(apart)), key=lambda at: math.inf if math.isnan(apart[at]) else apart[at])
    if not apart[worst] <= tolerance:
        raise LivenessError(
            f"{SECTION}: of {len(values)} prefixes that the trainer scored again, one has the value {own[worst]:.4f} "
            f"instead of {values[worst]:.4f} (allowed: {tolerance:g} nats): the rollout "
            f"engine holds other weights, or reads a stale prefix cache."
        )
    return apart[worst]
