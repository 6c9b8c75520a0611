"""A static interpreter of launch scripts: finds what a script would launch without running it.

``read_script`` is its one function. A script may install packages, start Ray or convert data before it trains, so none
of its programs is called but a few that only read (``programs``). A value that is not known is carried along as
``Unknown`` with its line and its cause, and is an error only where a launch needs it.
"""

from .interpreter import ProgramCall
from .script import read_script
from .shell_values import Field, ScriptEnd, ScriptError, Unknown

__all__ = ["Field", "ProgramCall", "ScriptEnd", "ScriptError", "Unknown", "read_script"]
