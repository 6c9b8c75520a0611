"""Causes that a run has seen itself: weights that did not reach the rollout engine, and updates that it rounds away.

Told from staleness, which delivered weights of an earlier step have, by the comparison of weights at each
synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cause import Cause, report_absent, report_untestable

UNDELIVERED, ROUNDED = "weights not delivered", "updates rounded away"
SEEN = 0.5
"""Share of the updates that the engine's rounding lets through, below which they are rounded away."""
_FIX_ROUNDED = "actor_rollout_ref.rollout.dtype=float32, or a larger actor_rollout_ref.actor.optim.lr"


def judge_delivery(lines: Sequence[Mapping[str, Any]]) -> list[Cause]:
    """Judge both causes by what a run recorded at its synchronisations; empty for a run that recorded nothing.

    Args:
        lines: ``step``, ``verdict`` (``equal`` or what was wrong), ``sentence``, and ``along`` and ``square`` of the
            update, of each synchronisation.
    """
    if not lines:
        return []
    wrong = [line for line in lines if line["verdict"] != "equal"]
    if wrong:
        first = wrong[0]
        sentence = f"at {len(wrong)} of {len(lines)} synchronisations; step {first['step']}: {first['sentence']}"
        delivered = Cause(UNDELIVERED, "present", {"synchronisations": float(len(wrong))}, sentence)
    else:
        sentence = f"the engine held the trainer's weights at each of {len(lines)} synchronisations"
        delivered = report_absent(UNDELIVERED, sentence, synchronisations=0.0)
    return [delivered, _judge_rounding(lines)]


def _judge_rounding(lines: Sequence[Mapping[str, Any]]) -> Cause:
    along, square = (sum(float(line.get(name, 0.0)) for line in lines) for name in ("along", "square"))
    if not square > 0:
        return report_untestable(ROUNDED, "no update between two synchronisations was recorded")
    seen = along / square
    sentence = f"the engine's dtype lets {seen:.2g} of the trainer's updates through"
    if seen >= SEEN:
        return report_absent(ROUNDED, sentence, seen=seen)
    return Cause(ROUNDED, "present", {"seen": seen}, f"{sentence}: it samples by older weights", _FIX_ROUNDED)
