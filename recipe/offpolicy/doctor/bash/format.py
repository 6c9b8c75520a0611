"""Formatting of parsed commands for messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .grammar import Chain, Command, Pipeline, Simple, Test
from .shell_values import ScriptEnd

_LONGEST = 80


def format_command(command: Command) -> str:
    """Format a condition in one line, shortened if long; "..." if it is not a simple condition."""
    text = _format(command).replace("\n", " ")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _format(command: Command) -> str:
    match command:
        case Simple():
            return " ".join(token.text for token in (*command.assignments, *command.words))
        case Test():
            inside = " ".join(token.text for token in command.tokens)
            return f"(({inside}))" if [token.kind for token in command.tokens] == ["arithmetic"] else f"[[ {inside} ]]"
        case Chain():
            return " ".join(
                (_format(command.first), *(f"{operator} {_format(each)}" for operator, each in command.rest))
            )
        case Pipeline():
            return "! " * command.negated + " | ".join(map(_format, command.commands))
    return "..."


@contextmanager
def note_condition(condition: str) -> Iterator[None]:
    """Record, on a ScriptEnd raised inside, the innermost condition under which it was raised."""
    try:
        yield
    except ScriptEnd as end:
        end.because = end.because or condition
        raise
