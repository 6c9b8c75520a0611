"""Defaults shown by the command line, in a module without imports so that ``--help`` is fast."""

from __future__ import annotations

QUANTILE = 0.99
"""Quantile of the backend noise that delta has to exceed."""
ROUNDING = 1e-3
"""Largest mean |log pi - log pi_old| of a row, in nats per token, at which the two passes count as one policy."""
