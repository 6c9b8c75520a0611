"""Calibration of bounds to a target kept share or effective sample size, from recordings."""

QUANTILE = 0.99
"""Quantile of the backend noise that delta must exceed; defined here, without imports, so that ``--help`` is fast."""
