"""Causes of a mismatch between mu and pi_old: one statistical test per module, over recorded tokens."""

from .cause import NAMES, Cause
from .find import find_causes, find_causes_in_rows

__all__ = ["NAMES", "Cause", "find_causes", "find_causes_in_rows"]
