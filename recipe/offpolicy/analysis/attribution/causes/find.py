"""Search for the causes of a mismatch: a sequence of tests, and causes that the run itself has detected.

Misalignment is tested first, because log-probs of other tokens invalidate all other tests. Re-tokenised turns and stale
steps are then left out, so that the remaining tests cover only the backend. A comparison of weights at each
synchronisation distinguishes undelivered weights from delivered weights that are stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....delivery.delivery_settings import FIX_ROUNDED, LEAST_SEEN
from ....recording import Recording, Rows
from ..scored_rows import describe_none_scored, select_scored_rows
from . import misalignment, numerics, retokenisation, stale_weights, temperature, truncation
from .cause import LEAST_TOKENS, NAMES, Cause, report_absent, report_untestable
from .sampled_tokens import collect_tokens


def find_causes(recording: Recording | Rows) -> list[Cause]:
    """Decide for every cause of ``NAMES``, in that order, whether it is present.

    Log pi_old must come from the trainer's own weights. In a recording, only rows with such a log pi_old are judged
    (``select_scored_rows``); rows passed as an argument must meet the same condition. The card supplies the sampling
    settings, which rows do not contain.
    """
    if isinstance(recording, Rows):
        return find_causes_in_rows(recording, {})
    found = select_scored_rows(recording)
    if found.left_out and not len(found.rows):
        return [report_untestable(name, describe_none_scored(found.left_out)) for name in NAMES]
    return find_causes_in_rows(found.rows, recording.card)


def find_causes_in_rows(rows: Rows, card: Mapping[str, Any]) -> list[Cause]:
    """Decide for every cause whether it is present, in rows of a recording with this card."""
    sampled = collect_tokens(rows)
    if len(sampled) < LEAST_TOKENS:
        return [
            report_untestable(name, f"only {len(sampled)} tokens are recorded, and {LEAST_TOKENS} are needed")
            for name in NAMES
        ]
    # Two engines never agree bit for bit on this many tokens.
    if np.array_equal(sampled.tokens.mu, sampled.tokens.old):
        return [report_untestable(name, _explain_identity(card)) for name in NAMES]
    found = [misalignment.find(sampled)]
    if found[0].verdict == "present":
        why = "not tested: log mu belongs to other tokens"
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
        why = "not distinguishable from a difference in temperature: fix the temperature first"
        return found + [
            report_untestable(name, why) for name in (truncation.TRUNCATED, truncation.EXTRA, numerics.NAME)
        ]
    truncated, extra = truncation.find(sampled, sampling)
    # A constant offset per context would look like noise, so the numerics test then uses only the variation within
    # contexts.
    offset = "present" in (truncated.verdict, extra.verdict)
    return [*found, truncated, extra, numerics.find(sampled, offset=offset)]


def _explain_identity(card: Mapping[str, Any]) -> str:
    correction = card.get("correction")
    if isinstance(correction, dict) and correction.get("proximal") == "same_engine":
        return "mu equals pi_old bit for bit, as correction.proximal=same_engine requires: there is nothing to explain"
    return "mu equals pi_old bit for bit: was one copied from the other? Record with correction.proximal=recompute"


UNDELIVERED, ROUNDED = "weights not delivered", "updates rounded away"


def judge_delivery(lines: Sequence[Mapping[str, Any]]) -> list[Cause]:
    """Decide on both delivery causes from a run's synchronisation records; the result is empty if there are no records.

    Args:
        lines: for each synchronisation, ``step``, ``verdict`` (``equal`` or what was wrong), ``sentence``, and
            ``along`` and ``square`` of the update.
    """
    if not lines:
        return []
    wrong = [line for line in lines if line["verdict"] != "equal"]
    if wrong:
        first = wrong[0]
        sentence = (
            f"at {len(wrong)} of {len(lines)} synchronisations the engine did not hold the trainer's weights; "
            f"step {first['step']}: {first['sentence']}"
        )
        delivered = Cause(UNDELIVERED, "present", {"synchronisations": float(len(wrong))}, sentence)
    else:
        sentence = f"the engine held the trainer's weights at each of {len(lines)} synchronisations"
        delivered = report_absent(UNDELIVERED, sentence, synchronisations=0.0)
    return [delivered, _judge_rounding(lines)]


def withdraw_staleness(delivery: Sequence[Cause], causes: Sequence[Cause], *, stale: bool) -> list[Cause]:
    """Withdraw a verdict of stale weights if rounded updates explain it.

    Updates that the engine's dtype rounds away make the KL grow from step to step, just as older weights do. If all
    weights were delivered and no token is recorded as ``stale``, the growth is therefore not a sign of older weights.

    Args:
        delivery: the verdicts of ``judge_delivery``.
    """
    verdicts = {cause.name: cause.verdict for cause in delivery}
    if stale or verdicts.get(UNDELIVERED) != "absent" or verdicts.get(ROUNDED) != "present":
        return list(causes)
    why = "the KL grows as it would if updates were rounded away, and all weights were delivered"
    return [
        report_untestable(cause.name, why, **cause.evidence) if cause.fix == stale_weights.FIX_WEIGHTS else cause
        for cause in causes
    ]


def _judge_rounding(lines: Sequence[Mapping[str, Any]]) -> Cause:
    along, square = (sum(float(line.get(name, 0.0)) for line in lines) for name in ("along", "square"))
    if not square > 0:
        return report_untestable(ROUNDED, "no update between two synchronisations was recorded")
    seen = along / square
    sentence = f"the engine's dtype lets {seen:.2g} of the trainer's updates through"
    if seen >= LEAST_SEEN:
        return report_absent(ROUNDED, sentence, seen=seen)
    return Cause(ROUNDED, "present", {"seen": seen}, f"{sentence}: the engine samples with older weights", FIX_ROUNDED)
