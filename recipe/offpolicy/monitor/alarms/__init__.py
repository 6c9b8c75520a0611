"""Alarms: what a run does when a statistic of the correction leaves the range in which it can be trusted."""
