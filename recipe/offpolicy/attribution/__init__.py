"""Where the mismatch of a run comes from: backend, staleness and drift, where it sits, and what causes it."""

from .attribution import Attribution, attribute, explain
from .causes import Cause, find_causes

__all__ = ["Attribution", "Cause", "attribute", "explain", "find_causes"]
