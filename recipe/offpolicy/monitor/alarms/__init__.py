"""Alarms on the correction's statistics, with the actions warn, stop and fallback."""
