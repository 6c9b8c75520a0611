"""Why mu and pi_old differ: tests over recordings, one cause a module, that tell the usual causes apart."""

from .cause import NAMES, Cause
from .find import find_causes, find_in

__all__ = ["NAMES", "Cause", "find_causes", "find_in"]
