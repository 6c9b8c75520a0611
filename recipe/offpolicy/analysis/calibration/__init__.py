"""Calibration of bounds to a target kept share or effective sample size, from recordings."""
