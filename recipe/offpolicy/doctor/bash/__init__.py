"""A static interpreter of launch scripts: finds what a script would launch without running it.

A script may install packages, start Ray or convert data before it trains, so none of its programs is called but a few
that only read (``programs``). A value that is not known is carried along as ``Unknown`` with its line and its cause,
and is an error only where a launch needs it.
"""
