"""Tools that read recordings, offline: attribution, what-if, calibration, the report and their pages."""
