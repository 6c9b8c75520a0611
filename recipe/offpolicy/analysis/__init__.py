"""Offline tools that read recordings: attribution, what-if, calibration, the report and their pages."""
