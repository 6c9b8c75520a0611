"""Configuration problems as data, worded in one place, and the exceptions that carry them.

A mistyped threshold that is taken for a valid one degrades a run in silence, so each problem names the key, its value,
the reason and an override that fixes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["NOTE", "NO-OP", "ERROR"]
"""NOTE: works as configured, and is rarely all that was meant. NO-OP: trains without any effect. ERROR: would train
otherwise than configured, and stops the launch."""

EVERYTHING = ("*",)
"""Concerns every correction that is configured."""
MU = ("mu",)
"""Concerns every correction that reads the rollout engine's log-probs."""

_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*")
_BARE = re.compile(r"[^\s'\"]+")
_WORDS = frozenset({"null", "true", "false", "nan", "inf"})


@dataclass(frozen=True)
class Problem:
    """A configuration problem: key, value, reason, and the overrides that fix it.

    Attributes:
        key, value: as Hydra has them; an empty key where the reason needs none.
        reason: a sentence.
        fix: a sentence; empty for the one that the overrides make, if there are any.
        verdict: what becomes of the corrections that it concerns.
        parts: names of these corrections, ``EVERYTHING`` or ``MU``.
        overrides: the fix in Hydra's grammar, to be put behind the overrides of the launch.
        alongside: other keys, and their values, without which the value would be fine.
        translated: the overrides say what was meant by the value; otherwise they replace it.
    """

    key: str
    value: Any = field(hash=False)
    reason: str
    fix: str = ""
    verdict: Verdict = "ERROR"
    parts: tuple[str, ...] = EVERYTHING
    overrides: tuple[str, ...] = ()
    alongside: Mapping[str, Any] = field(default_factory=dict, hash=False)
    translated: bool = False

    @property
    def cause(self) -> str:
        """The reason, with the keys that it depends on."""
        others = " and ".join(f"{key}={format_value(value)}" for key, value in self.alongside.items())
        return f"with {others}: {self.reason}" if others else self.reason

    @property
    def advice(self) -> str:
        """The fix as a sentence."""
        if self.fix or not self.overrides:
            return self.fix
        removed = {override[1:] for override in self.overrides if override.startswith("~")}
        # A null has to be set before Hydra can remove it; the sentence leaves that step out.
        stated = [each for each in self.overrides if each.partition("=")[0] not in removed]
        *first, last = map(_phrase, stated)
        sentence = f"{', '.join(first)} and {last}." if first else f"{last}."
        return sentence[:1].upper() + sentence[1:]

    @property
    def pasted(self) -> str:
        """The overrides as shell words."""
        return shlex.join(self.overrides)

    @property
    def statement(self) -> str:
        """The key, its value and the reason, without the fix."""
        return (
            f"{self.key}={format_value(self.value)}{' ' if self.alongside else ': '}{self.cause}"
            if self.key
            else self.cause
        )

    def __str__(self) -> str:
        return f"{self.statement} {self.advice}".strip()


def _phrase(override: str) -> str:
    return f"remove {override.lstrip('~')}" if override.startswith("~") else f"set {override.lstrip('+')}"


class SpecError(ValueError):
    """Invalid value of a correction.

    Args:
        reason, fix: sentences; without a fix the one that ``proposed`` makes.
        key, value: as they were given; an empty key where the reason needs none.
        alongside: other keys and their values, without which the value would be fine.
        fix: key -> the value that fixes it.
        meant: key -> the value that was meant, in the same place.
        removed: keys that are to be taken away before, with the values that they have.

    Attributes:
        problem: all of it.
    """

    def __init__(
        self,
        reason: str,
        fix: str = "",
        *,
        key: str = "",
        value: Any = None,
        alongside: Mapping[str, Any] | None = None,
        proposed: Mapping[str, Any] | None = None,
        meant: Mapping[str, Any] | None = None,
        removed: Mapping[str, Any] | None = None,
    ) -> None:
        away = [override for name, given in (removed or {}).items() for override in remove(name, given)]
        put = [set_to(name, wanted) for name, wanted in (meant or proposed or {}).items()]
        self.problem = Problem(
            key, value, reason, fix, overrides=(*away, *put), alongside=dict(alongside or {}), translated=bool(meant)
        )
        super().__init__(str(self.problem))


class CheckError(RuntimeError):
    """Configuration that would train otherwise than intended; carries all of its problems."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[CheckError], tuple[Sequence[Problem]]]:
        return type(self), (self.problems,)  # Ray sends it from the task runner


def set_to(key: str, value: object, *, add: bool = False) -> str:
    """Build the override ``key=value`` in Hydra's grammar; ``add`` for keys that the configuration may not have.

    Example:
        >>> set_to("correction.weight.upper", 2.0)
        'correction.weight.upper=2.0'
    """
    return f"{'++' if add else ''}{key}={quote_value(value)}"


def remove(key: str, value: object) -> tuple[str, ...]:
    """Build the overrides that delete a key which has this value.

    Example:
        >>> remove("correction.masks.gsm", {"lower": 0.99})
        ('~correction.masks.gsm',)
        >>> remove("correction.alpha", None)
        ('correction.alpha=0', '~correction.alpha')
    """
    # Hydra takes a null for a key that is not there, and cannot delete it.
    return ((set_to(key, 0),) if value in (None, "???") else ()) + (f"~{key}",)


def quote_value(value: object) -> str:
    """Format a value in Hydra's grammar; strings that Hydra would read as another type are quoted, also in mappings.

    Example:
        >>> quote_value({"level": "token", "name": "null"})
        '{level: token, name: "null"}'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {quote_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(quote_value, value))}]"
    if not isinstance(value, str):
        return format_value(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _reads_otherwise(text: str) -> bool:
    """Return True if Hydra would read a bare text as another type than a string."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return text.lower() in _WORDS
    return True


def format_value(value: object) -> str:
    """Format a value for messages: as Hydra writes it, strings that look like another type in quotes.

    Example:
        >>> format_value(None), format_value(True), format_value("2.0"), format_value([1, "a"])
        ('null', 'true', "'2.0'", '[1,a]')
    """
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) and not _reads_otherwise(value) else repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {format_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
