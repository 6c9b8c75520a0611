"""A static interpreter of launch scripts: finds what a script would launch without running it.

``read_script`` is the entry point. A script may install packages, start Ray or convert data before it trains, so none
of its programs is run except a few read-only ones (``programs``). An unknown value is kept as ``Unknown`` with its line
and its cause, and is an error only if a launch needs it.
"""
