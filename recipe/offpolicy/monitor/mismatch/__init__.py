"""Sums and statistics of the mismatch that every training step reports."""
