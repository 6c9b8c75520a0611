"""Monitoring during training: alarms, moving bounds, mismatch, the active correction and its cost."""
