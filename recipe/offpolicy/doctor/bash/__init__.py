"""A static interpreter of launch scripts: finds what a script would launch without running it.

``read_script`` is its only function. A script may install packages, start Ray or convert data before it trains, so none
of its programs is run except a few read-only ones (``programs``). An unknown value is kept as ``Unknown`` with its line
and its cause, and is an error only if a launch needs it.
"""

from .interpreter import ProgramCall
from .script import read_script
from .shell_values import Field, ScriptEnd, ScriptError, Unknown

__all__ = ["Field", "ProgramCall", "ScriptEnd", "ScriptError", "Unknown", "read_script"]
