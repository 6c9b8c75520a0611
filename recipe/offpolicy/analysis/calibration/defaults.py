"""Defaults shown by the command line, in a module without imports so that ``--help`` is fast."""

from __future__ import annotations

QUANTILE = 0.99
"""Quantile of the backend noise that delta has to exceed."""
ROUNDING = 1e-3
"""Nats per token: mean |log pi - log pi_old| of a row up to which the two passes count as one policy."""
