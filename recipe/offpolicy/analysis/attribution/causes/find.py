"""Search for the causes of a mismatch: each test sees the tokens that the tests before it have not explained.

Misalignment is tested first: log-probs of other tokens invalidate every other test. What is re-tokenized
is then left out turn by turn, and what is stale step by step, so that the remaining tests see the backend alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....recording import Recording, Rows
from ..scored_rows import describe_none_scored, select_scored_rows
from . import misalignment, numerics, retokenisation, stale_weights, temperature, truncation
from .cause import NAMES, Cause, report_untestable
from .sampled_tokens import collect_tokens
from .thresholds import LEAST_TOKENS


def find_causes(recording: Recording | Rows) -> list[Cause]:
    """Judge every cause of ``NAMES``, in that order.

    Log pi_old has to be of the trainer's own weights: of a recording only such rows are judged
    (``select_scored_rows``), rows that are passed have to be so. The card supplies the sampling settings, which rows
    do not show.
    """
    if isinstance(recording, Rows):
        return find_causes_in_rows(recording, {})
    found = select_scored_rows(recording)
    if found.left_out and not len(found.rows):
        return [report_untestable(name, describe_none_scored(found.left_out)) for name in NAMES]
    return find_causes_in_rows(found.rows, recording.card)


def find_causes_in_rows(rows: Rows, card: Mapping[str, Any]) -> list[Cause]:
    """Judge every cause in rows of a recording with this card."""
    sampled = collect_tokens(rows)
    if len(sampled) < LEAST_TOKENS:
        return [
            report_untestable(name, f"{len(sampled)} tokens are recorded, {LEAST_TOKENS} are needed") for name in NAMES
        ]
    # Two engines never agree to the bit on this many tokens.
    if np.array_equal(sampled.tokens.mu, sampled.tokens.old):
        return [report_untestable(name, _explain_identity(card)) for name in NAMES]
    found = [misalignment.find(sampled)]
    if found[0].verdict == "present":
        why = "not looked for: log mu belongs to other tokens"
        return found + [report_untestable(name, why) for name in NAMES if name != misalignment.NAME]
    of_turns, clean = retokenisation.find(sampled)
    sampled = sampled.take(clean)
    of_steps, fresh = stale_weights.find(sampled)
    sampled = sampled.take(fresh)
    known = card.get("sampling")
    sampling = known if isinstance(known, dict) else {}
    of_temperature = temperature.find(sampled, sampling)
    found += [of_turns, of_steps, of_temperature]
    if of_temperature.verdict == "present":
        why = "not distinguishable from a difference in temperature: fix that first"
        return found + [
            report_untestable(name, why) for name in (truncation.TRUNCATED, truncation.EXTRA, numerics.NAME)
        ]
    truncated, extra = truncation.find(sampled, sampling)
    # A constant offset by context would pass for noise: numerics then looks within contexts only.
    offset = "present" in (truncated.verdict, extra.verdict)
    return [*found, truncated, extra, numerics.find(sampled, offset=offset)]


def _explain_identity(card: Mapping[str, Any]) -> str:
    correction = card.get("correction")
    if isinstance(correction, dict) and correction.get("proximal") == "same_engine":
        return "mu is pi_old to the bit, as correction.proximal=same_engine has it: there is nothing to explain"
    return "mu is pi_old to the bit: one was copied from the other? Record with correction.proximal=recompute"
