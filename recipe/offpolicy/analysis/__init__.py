"""Offline tools that read recordings: attribution, what-if, calibration, the report and their pages."""


class AnalysisError(ValueError):
    """An analysis is not possible with these arguments or data; the message says why, and how to fix it."""
