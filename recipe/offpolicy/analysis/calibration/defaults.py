"""Defaults that the command line shows; this module has no imports, so that ``--help`` is fast."""

from __future__ import annotations

QUANTILE = 0.99
"""Quantile of the backend noise that delta must exceed."""
ROUNDING = 1e-3
"""Largest mean |log pi - log pi_old| of a row, in nats per token, at which pi and pi_old count as one policy."""
