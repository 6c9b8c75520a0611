"""Declarations of the keys of a configuration section, and the problems found in their values."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..correction.problem import EVERYTHING, Problem, Verdict, find_closest, format_value, remove, set_to
from ..correction.validation import read_numbers


class Configured:
    """A composed configuration.

    Args:
        config: configuration of the launch.
        parts: corrections that the configuration's problems concern, see ``Problem``.
    """

    def __init__(self, config: DictConfig, *parts: str) -> None:
        self.config, self._parts = config, parts or EVERYTHING

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at a dotted key; None if the key is null, ``default`` if it is missing."""
        return OmegaConf.select(self.config, key, default=default)

    def problem(
        self,
        key: str,
        reason: str,
        fix: str = "",
        sets: Mapping[str, Any] | Iterable[str] = (),
        parts: tuple[str, ...] | None = None,
        verdict: Verdict = "ERROR",
        alongside: Mapping[str, Any] | Iterable[str] = (),
        **more: Any,
    ) -> Problem:
        """Build a problem that reports a key with its present value.

        Args:
            sets: the overrides that fix the problem, or keys and their values.
            parts: corrections that the problem concerns; None: the ``parts`` of this configuration.
            alongside: other keys that contribute to the problem; a mapping also overrides their present values.
            more: a ``value`` that is not in the configuration, or other fields of ``Problem``.
        """
        overrides = [set_to(*each) for each in sets.items()] if isinstance(sets, Mapping) else sets
        value = more.pop("value") if "value" in more else self.get(key)
        others = dict(alongside) if isinstance(alongside, Mapping) else {each: self.get(each) for each in alongside}
        named = self._parts if parts is None else parts
        return Problem(key, value, reason, fix, verdict, named, tuple(overrides), **{"alongside": others} | more)


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """Declaration of one key.

    Attributes:
        fits: returns True for an accepted value.
        words: description of accepted values, to follow "expected".
        read_with: (another key, the value that it must have for this key to be used, or ... for any value except null).
        options: the accepted words; the most similar one is proposed if there is no default.
    """

    fits: Callable[[Any], bool]
    words: str
    read_with: tuple[str, Any] | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A rule that is broken if the values of two keys contradict each other.

    Attributes:
        key: the key that is reported.
        broken: returns True if the values contradict each other.
        reason: explanation.
        instead: returns the value that resolves the contradiction.
        alongside: the other key.
    """

    key: str
    broken: Callable[[Values], bool]
    reason: str
    instead: Callable[[Values], Any]
    alongside: str


@dataclass(frozen=True)
class Section:
    """The keys under ``path``; keys of a nested section contain a dot.

    Attributes:
        path: for example ``offpolicy.staleness``.
        shipped: the defaults, from the shipped YAML.
        keys: name -> declaration.
        rules: rules to check if every single value is accepted.
        hints: each key that is null by default -> a value to suggest for it.
    """

    path: str
    shipped: Values
    keys: Mapping[str, Key]
    rules: Sequence[Rule] = ()
    hints: Values | None = None

    def read(self, config: Any) -> Any:
        """Return the section as plain values; None if it is null or absent."""
        node = OmegaConf.select(config, self.path, default=None)
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node

    def find_problems(self, config: Any) -> Iterator[Problem]:
        """Find unknown keys and invalid values; if there are none, find unused keys and broken rules."""
        yield from self.check(self.read(config))

    def check(self, given: Any) -> Iterator[Problem]:
        """Find the same problems as ``find_problems``, but in plain values."""
        if given is None:
            return
        if not isinstance(given, Mapping):
            fix = f"Set one of them, or {self.path}={{}} for the defaults."
            yield self._build("", given, f"expected a section with the keys {', '.join(self.shipped)}.", fix)
            return
        default, values = flatten(self.shipped), flatten(given)
        yield from self._find_unknown(given, self.shipped, "")
        known = {name: value for name, value in values.items() if name in self.keys}
        unfit = {name: value for name, value in known.items() if not self.keys[name].fits(value)}
        for name, value in unfit.items():
            instead = self._replace(name, value, default[name])
            key = self.keys[name]
            fix = f"Set {key.words}." if key.options else f"Set one, or {format_value(default[name])}, the default."
            fix = "" if instead else fix
            yield self._build(name, value, f"expected {key.words}.", fix, *instead)
        if not unfit:
            yield from self._find_unread({**default, **known}, default)
            yield from self._find_contradictions({**default, **known})

    def _replace(self, name: str, value: Any, default: Any) -> tuple[str, ...]:
        """Build an override with the value that was probably meant, or else with the default, or the hint for null."""
        meant = [number for number in read_numbers(value) if self.keys[name].fits(number)]
        near = find_closest(value, self.keys[name].options, 0.7) if isinstance(value, str) else None
        usual = default if default is not None else (self.hints or {}).get(name)
        instead = meant[0] if meant else near or usual
        return () if instead is None else (set_to(f"{self.path}.{name}", instead),)

    def _find_unknown(self, values: Values, shipped: Values, prefix: str) -> Iterator[Problem]:
        for name, value in values.items():
            full = f"{prefix}{name}"
            if name not in shipped:
                near = find_closest(str(name), [each for each in shipped if f"{prefix}{each}" in self.keys])
                at = f"{self.path}.{prefix}{near}"
                fix = f"Did you mean {at}?" if near else f"Known under {self.path}: {', '.join(shipped)}."
                moved = (*remove(f"{self.path}.{full}", value), set_to(at, value)) if near else ()
                yield build_unknown(f"{self.path}.{full}", value, fix, *moved)
            elif isinstance(shipped[name], Mapping):
                if isinstance(value, Mapping):
                    yield from self._find_unknown(value, shipped[name], f"{full}.")
                elif value is not None:
                    yield self._build(full, value, f"expected a section with the keys {', '.join(shipped[name])}.", "")
            elif isinstance(value, Mapping) and (key := self.keys.get(full)) and not key.fits(value):
                yield self._build(full, value, f"expected {key.words}.", f"There are no keys under {full}.")

    def _find_unread(self, values: Values, default: Values) -> Iterator[Problem]:
        for name, key in self.keys.items():
            if key.read_with is None or values[name] == default[name]:
                continue
            other, wanted = key.read_with
            at, there = f"{self.path}.{other}", values[other]
            if there is None if wanted is ... else there != wanted:
                hint = (self.hints or {}).get(other, "...") if wanted is ... else wanted
                back = set_to(f"{self.path}.{name}", default[name])
                alone = at if wanted is ... else f"{other}={format_value(wanted)}"
                fix = f"Set {at}={hint}, or {back}."
                yield self._build(name, values[name], f"read only with {alone}.", fix, alongside={at: there})

    def _find_contradictions(self, values: Values) -> Iterator[Problem]:
        for rule in self.rules:
            if rule.broken(values):
                back = set_to(f"{self.path}.{rule.key}", rule.instead(values))
                alongside = {f"{self.path}.{rule.alongside}": values[rule.alongside]}
                yield self._build(rule.key, values[rule.key], rule.reason, "", back, alongside=alongside)

    def _build(
        self, name: str, value: Any, reason: str, fix: str, *overrides: str, alongside: Values | None = None
    ) -> Problem:
        key = f"{self.path}.{name}" if name else self.path
        return Problem(key, value, reason, fix, parts=(), overrides=overrides, alongside=dict(alongside or {}))


def build_unknown(key: str, value: Any, fix: str, *overrides: str) -> Problem:
    """Build the problem that reports an unknown key."""
    return Problem(key, value, "unknown key.", fix, parts=(), overrides=overrides)


def number(
    words: str,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    null: bool = False,
    read_with: tuple[str, Any] | None = None,
) -> Key:
    """Declare a finite number; ``least`` and ``most`` are inclusive, ``above`` and ``below`` exclusive.

    Example:
        >>> number("a share", 0, 1).fits(0.5), number("a share", 0, 1).fits(True)
        (True, False)
    """

    def fits(value: Any) -> bool:
        plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return (null and value is None) or (plain and least <= value <= most and above < value < below)

    return Key(fits, words, read_with)


def count(words: str, least: int = 1, *, null: bool = False, read_with: tuple[str, Any] | None = None) -> Key:
    """Declare a whole number.

    Example:
        >>> count("a number of steps, 1 or more").fits(1), count("a number of steps, 1 or more").fits(1.0)
        (True, False)
    """
    fits = number(words, least, null=null).fits
    return Key(lambda value: fits(value) and not isinstance(value, float), words, read_with)


def flag(*, read_with: tuple[str, Any] | None = None) -> Key:
    """Declare true or false.

    Example:
        >>> flag().fits(True), flag().fits("yes")
        (True, False)
    """
    return Key(lambda value: isinstance(value, bool), "true or false", read_with)


def choice(*options: str, null: str = "", read_with: tuple[str, Any] | None = None) -> Key:
    """Declare a choice of words; ``null`` describes the meaning of null if null is accepted.

    Example:
        >>> choice("wait", "drop").words
        'one of [wait,drop]'
    """
    words = f"one of {format_value(list(options))}{f', or null {null}' if null else ''}"
    return Key(lambda value: value in options or (null != "" and value is None), words, read_with, options)


def flatten(values: Values, prefix: str = "") -> dict[str, Any]:
    """Return the values that are not sections, by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


_FILE = Path(__file__).resolve().parents[1] / "config" / "offpolicy_base.yaml"


def read_shipped_defaults(section: str) -> Any:
    """Read the shipped values of a section under ``offpolicy`` (key -> value, in file order), or a single value."""
    return copy.copy(_sections()[section])


@cache
def _sections() -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(_FILE).offpolicy)
    return dict(values)
