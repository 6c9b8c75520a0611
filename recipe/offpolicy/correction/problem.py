"""Configuration problems as data, their wording, and the exceptions that carry them.

A mistyped threshold that passes validation silently degrades a run, so each problem names the key, its value, the
reason and an override that fixes it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["NOTE", "NO-OP", "ERROR"]
"""NOTE: the run works as configured, but that is probably not all that was intended. NO-OP: the run trains, but the
correction has no effect. ERROR: the run would not train as configured, so the launch stops."""

EVERYTHING = ("*",)
"""Marks a problem that concerns every configured correction."""
MU = ("mu",)
"""Marks a problem that concerns every correction that reads the rollout engine's log-probs."""

_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*")
_BARE = re.compile(r"[^\s'\"]+")
_WORDS = frozenset({"null", "true", "false", "nan", "inf"})


@dataclass(frozen=True)
class Problem:
    """A configuration problem: key, value, reason, and the overrides that fix it.

    Attributes:
        key, value: as in Hydra; the key is empty if the reason does not concern a single key.
        reason: a sentence.
        fix: a sentence; if it is empty, the sentence is built from the overrides, if there are any.
        verdict: effect on the corrections that the problem concerns.
        parts: names of these corrections, ``EVERYTHING`` or ``MU``.
        overrides: the fix in Hydra's grammar; append them to the overrides of the launch.
        alongside: other keys that contribute to the problem, with their values.
        translated: whether the overrides express the meaning of the value; otherwise they replace it.
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
        # Hydra cannot remove a null key until a value is set; the sentence leaves out that step.
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
        reason, fix: sentences; without a fix, the sentence is built from ``proposed``.
        key, value: as given by the user; the key is empty if the reason does not concern a single key.
        alongside: other keys that contribute to the problem, with their values.
        proposed: key -> the value that fixes it.
        meant: key -> the value that was probably meant; used like ``proposed``.
        removed: keys to delete first, with their present values.

    Attributes:
        problem: the problem that these arguments describe.
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

    @classmethod
    def under(
        cls,
        section: str,
        name: str,
        value: Any,
        reason: str,
        fix: str = "",
        *,
        alongside: Mapping[str, Any] | None = None,
        proposed: Mapping[str, Any] | None = None,
    ) -> SpecError:
        """Build the error for ``section.name``; ``alongside`` and ``proposed`` have keys relative to ``section``."""
        others, put = (
            {f"{section}.{each}": given for each, given in (values or {}).items()} for values in (alongside, proposed)
        )
        return cls(reason, fix, key=f"{section}.{name}", value=value, alongside=others, proposed=put)


class CheckError(RuntimeError):
    """The configuration would not train as intended; the exception lists all of its problems."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[CheckError], tuple[Sequence[Problem]]]:
        return type(self), (self.problems,)  # Ray pickles the exception to send it from the task runner


def set_to(key: str, value: object, *, add: bool = False) -> str:
    """Build the override ``key=value`` in Hydra's grammar; set ``add`` if the configuration may not contain the key.

    Example:
        >>> set_to("correction.weight.upper", 2.0)
        'correction.weight.upper=2.0'
    """
    return f"{'++' if add else ''}{key}={quote_value(value)}"


def remove(key: str, value: object) -> tuple[str, ...]:
    """Build the overrides that delete a key whose present value is ``value``.

    Example:
        >>> remove("correction.masks.gsm", {"lower": 0.99})
        ('~correction.masks.gsm',)
        >>> remove("correction.alpha", None)
        ('correction.alpha=0', '~correction.alpha')
    """
    # Hydra treats a null key as missing, and cannot delete it.
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
    """Return True if Hydra would not read the unquoted text as a string."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return text.lower() in _WORDS
    return True


def format_value(value: object) -> str:
    """Format a value for messages as Hydra writes it, with quotes around strings that look like another type.

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


_CLOSE = 0.8


def find_closest(word: str, known: Iterable[str], cutoff: float = _CLOSE) -> str | None:
    """Find the known name that a word was probably meant to be; None if no known name is similar.

    Case, ``_``, ``-`` and a plural s are ignored. A name matches if it has the same letters in another order, or a
    similarity of at least ``cutoff``.

    Example:
        >>> find_closest("ice_pop", ["icepop", "gsm"]), find_closest("gms", ["icepop", "gsm"])
        ('icepop', 'gsm')
        >>> find_closest("x", ["icepop", "gsm"])
    """
    names = list(known)
    bare = {_strip(name): name for name in reversed(names)}
    given = _strip(word)
    if word in names or given in bare:
        return word if word in names else bare[given]
    swapped = [name for stripped, name in bare.items() if sorted(stripped) == sorted(given)]
    near = [bare[each] for each in difflib.get_close_matches(given, bare, 1, cutoff)]
    return next(iter([*swapped, *near]), None)


def _strip(word: str) -> str:
    plain = word.lower().replace("_", "").replace("-", "")
    return plain.removesuffix("s") if len(plain) > 2 else plain


@dataclass(frozen=True)
class Requirement:
    """Values that a feature requires of a configuration key.

    Attributes:
        key: Hydra path.
        wanted: values with which the feature works; the first is proposed. A key may also be null or missing.
        reason: why other values do not work.
        together: further keys to set with the proposed value, and their values.
    """

    key: str
    wanted: tuple[Any, ...]
    reason: str
    together: tuple[tuple[str, Any], ...] = ()


def find_unmet(
    requirements: Iterable[Requirement],
    read: Callable[[str], Any],
    off: str,
    parts: tuple[str, ...],
    alongside: Mapping[str, Any] | None = None,
) -> Iterator[Problem]:
    """Find keys whose values do not fit a feature.

    Args:
        read: returns the value of a key; None if it is null or missing.
        off: the override that switches the feature off.
        parts, alongside: see ``Problem``.

    Example:
        >>> rows = [Requirement("model.fused", (False,), "fused kernels hide the logits.")]
        >>> print(*find_unmet(rows, {"model.fused": True}.get, "support=null", ("support",)))
        model.fused=true: fused kernels hide the logits. Set model.fused=false, or support=null.
    """
    for each in requirements:
        value = read(each.key)
        if value is None or value in each.wanted:
            continue
        proposed = (set_to(each.key, each.wanted[0]), *(set_to(*other) for other in each.together))
        fix = f"Set {' and '.join(proposed)}, or {off}."
        yield Problem(each.key, value, each.reason, fix, "ERROR", parts, proposed, dict(alongside or {}))
