"""The trainer's verdict on the reports of one extension: rows are compared, then the extension judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipe.offpolicy.extensions.add_on import Extension
from recipe.offpolicy.extensions.add_ons import AddOns


def judge(extension: Extension, reports: Sequence[Any], epochs: int = 1) -> dict[str, float]:
    """Return the metrics that the verdict adds."""
    hooks = AddOns([extension])
    hooks._prompts_seen = hooks._advantages_seen = True
    hooks.judge([{extension.section: report} for report in reports], epochs)
    return dict(hooks._judged)
