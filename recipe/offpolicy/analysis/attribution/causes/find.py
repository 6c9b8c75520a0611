"""The cause finder: each test sees what the ones before it have left unexplained.

Misalignment is looked for first, as nothing can be said of log-probs that belong to other tokens. What is re-tokenized
is then left out turn by turn, and what is stale step by step, so that the remaining tests see the backend alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....recording import Recording, Rows
from ..scored import none_scored, scored
from . import misalignment, normaliser, numerics, stale, temperature, turns
from .cause import NAMES, Cause, untestable
from .sampled import sampled_of
from .thresholds import LEAST_TOKENS


def find_causes(recording: Recording | Rows) -> list[Cause]:
    """Every cause of ``NAMES`` with its verdict, in that order.

    Needs log pi_old by the trainer's own weights: of a recording, rows that have it are judged, see ``scored.scored``;
    rows that are given have to have it. Verdicts are of the rows; a recording's card is asked only what cannot be told
    from them.
    """
    if isinstance(recording, Rows):
        return find_in(recording, {})
    found = scored(recording)
    if found.left_out and not len(found.rows):
        return [untestable(name, none_scored(found.left_out)) for name in NAMES]
    return find_in(found.rows, recording.card)


def find_in(rows: Rows, card: Mapping[str, Any]) -> list[Cause]:
    """The same of some rows of a recording with this card."""
    sampled = sampled_of(rows)
    if len(sampled) < LEAST_TOKENS:
        return [untestable(name, f"{len(sampled)} tokens are recorded, {LEAST_TOKENS} are needed") for name in NAMES]
    if np.array_equal(sampled.tokens.mu, sampled.tokens.old):
        return [
            untestable(
                name,
                "mu is pi_old to the bit: one was copied from the other? Record with correction.proximal=recompute",
            )
            for name in NAMES
        ]
    found = [misalignment.find(sampled)]
    if found[0].verdict == "present":
        why = "not looked for: log mu belongs to other tokens"
        return found + [untestable(name, why) for name in NAMES if name != misalignment.NAME]
    of_turns, clean = turns.find(sampled)
    sampled = sampled.take(clean)
    of_steps, fresh = stale.find(sampled)
    sampled = sampled.take(fresh)
    known = card.get("sampling")
    sampling = known if isinstance(known, dict) else {}
    of_temperature = temperature.find(sampled, sampling)
    found += [of_turns, of_steps, of_temperature]
    if of_temperature.verdict == "present":
        why = "not told apart from a difference in temperature: mend that first"
        return found + [untestable(name, why) for name in (normaliser.TRUNCATED, normaliser.EXTRA, numerics.NAME)]
    truncated, extra = normaliser.find(sampled, sampling)
    offset = "present" in (truncated.verdict, extra.verdict)
    return [*found, truncated, extra, numerics.find(sampled, offset=offset)]
