"""Calibration of bounds, from recordings, to a target for the kept share or the effective sample size."""

QUANTILE = 0.99
"""Quantile of the backend noise that delta must exceed; defined here, without imports, so that ``--help`` is fast."""
