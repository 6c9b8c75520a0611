"""What a check finds: a key, what is wrong with it, and what mends it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .correction import SpecError

Verdict = Literal["NOTE", "INERT", "WRONG"]
"""NOTE: it does what it says, and is rarely all that was meant. INERT: it would do nothing. WRONG: it would do
something else than it says, or end the run."""

EVERYTHING = ("*",)
"""Concerns every correction that is configured."""
MU = ("mu",)
"""Concerns every correction that reads the rollout engine's log-probs."""

Finding = tuple[str, object, str, str]
"""Key, value, reason and fix, as packages that know no verdicts yield them."""

_MESSAGE = re.compile(
    r"(?P<key>[\w.]+)=(?P<value>'[^']*'|\"[^\"]*\"|\{.*?\}|\[.*?\]|[^\s:]*|.*?)"
    r"(?:(?P<beside>(?: with| >) .*?))?: "
    r"(?P<reason>.*?)(?: (?P<fix>(?:Set|Swap|Leave|Choose|Stack|Give|Known|Write|Remove) .*))?",
    re.S,
)
_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*")
_ASSIGNED = re.compile(r"(?<![\w.])(\+{0,2}[a-z][\w.@/]*\.[\w.]+|correction|offpolicy)=(\[[^\]]*\]|'[^']*'|[^\s,;]+)")
_JOINT = re.compile(r",? and |, ")


@dataclass(frozen=True)
class Problem:
    """A key, the value it has, what is wrong with it, and the override that mends it.

    Attributes:
        key, value: as Hydra has them; an empty key where the reason says all.
        reason: a sentence.
        fix: a sentence; empty where no key mends it.
        verdict: what becomes of the corrections that it concerns.
        parts: names of these corrections, ``EVERYTHING`` or ``MU``.
        overrides: the fix in Hydra's grammar, to be put behind the overrides of the launch.
    """

    key: str
    value: Any
    reason: str
    fix: str
    verdict: Verdict = "WRONG"
    parts: tuple[str, ...] = EVERYTHING
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"{self.reason} {self.fix}".strip()
        return f"{self.key}={spelt(self.value)}: {said}" if self.key else said

    @property
    def pasted(self) -> str:
        """The overrides as words of a shell."""
        return shlex.join(self.overrides)


def set_to(key: str, value: object, *, add: bool = False) -> str:
    """The override ``key=value`` in Hydra's grammar; ``add`` for keys that the configuration may not have."""
    return f"{'++' if add else ''}{key}={quoted(value)}"


def taken_away(key: str, value: object) -> tuple[str, ...]:
    """Overrides after which nothing is left of a key that has this value."""
    # Hydra takes a null for a key that is not there, and cannot delete it.
    return ((set_to(key, 0),) if value in (None, "???") else ()) + (f"~{key}",)


def quoted(value: object) -> str:
    """A value in Hydra's grammar: strings that would be taken for something else in quotes, also within mappings."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {quoted(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(quoted, value))}]"
    if not isinstance(value, str):
        return spelt(value)
    if _PLAIN.fullmatch(value) and value.lower() not in {"null", "true", "false", "nan", "inf"}:
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def spelt(value: object) -> str:
    """A value as a message shows it: truth values and null as Hydra spells them."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def told(error: SpecError, parts: tuple[str, ...] = EVERYTHING) -> Problem:
    """The problem that a SpecError is: what it carries, else what its message "key=value: reason. Set fix." says."""
    message = str(error)
    found = _MESSAGE.fullmatch(message)
    if found is None:
        _, _, fix = message.rpartition(" Set ")
        return Problem("", None, message, "", "WRONG", parts, _mends(error) or named_overrides(f"Set {fix}"))
    beside, fix = found["beside"], found["fix"] or ""
    reason = f"{beside.strip().replace('> ', 'above ', 1)}: {found['reason']}" if beside else found["reason"]
    key, value = (error.key, error.value) if error.key else (found["key"], _unquoted(found["value"]))
    return Problem(key, value, reason, fix, "WRONG", parts, _mends(error) or named_overrides(fix))


def _mends(error: SpecError) -> tuple[str, ...]:
    removed = taken_away(error.removed, error.value) if error.removed else ()
    return (*removed, *(set_to(key, value) for key, value in error.overrides.items()))


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def named_overrides(sentence: str) -> tuple[str, ...]:
    """The first ``key=value`` that a sentence of ours proposes, with those that belong to it (", key=value" and
    " and key=value"); () where it names none or leaves the value open."""
    found = _ASSIGNED.search(sentence)
    overrides: list[str] = []
    while found is not None and "..." not in found[0]:
        value = found[2].rstrip(".:")
        overrides.append(f"{found[1]}={value}")
        joint = _JOINT.match(sentence, found.start(2) + len(value))
        found = _ASSIGNED.match(sentence, joint.end()) if joint else None
    return tuple(overrides)
