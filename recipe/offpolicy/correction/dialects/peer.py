"""Tables of other frameworks' keys, and their reader, which never silently ignores a key that concerns a correction."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Final

from ..problem import SpecError
from .options import Options

_WORDS: Final = re.compile(
    r"importance|icepop|mask|log_?prob|logp(?![a-z])|centering|replay|loss_type|(?<![a-z])tis(?!t)|_is$"
    r"|(?<![a-z])is_(?:batch|cap|clip|cor|enable|gat|high|level|log|loss|low|mask|mode|norm|ratio|thres|trunc|type|up|weig)"
    r"|correction|off_?policy|rejection|decoupled|behave?_|proximal|prox_|opsm|rho(?![a-z])|truncated_|trust_region"
    r"|veto|topr|kpop|reweigh|dppo|vespo|sapo|cispo|m2po|support_|mismatch|loss_mode|ratio_type|(?<![a-z])rs(?![a-z])|unbiased"
)
SCORE_CENTERING: Final = (
    (False, None),
    "score centering needs the engine's K likeliest tokens; set correction.centering.",
)
"""Entry of ``unsaid``: values that switch the key off, and the reason."""
_MISSING: Final = "???"
_LOOSELY: Final = re.compile(r"is_|tis")
_NEAR: Final = 0.83
"""Minimum similarity, as computed by ``difflib``, at which a name may be a misspelling of another."""


def names_a_correction(name: str) -> bool:
    """Return True if a name may belong to a correction.

    Example:
        >>> names_a_correction("vllm_is_truncated_threshold"), names_a_correction("statistics_dir")
        (True, False)
    """
    return _WORDS.search(_to_snake(name)) is not None


def _to_snake(name: str) -> str:
    """Convert a name to lower case with underscores, as in the tables."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@dataclass(frozen=True)
class Reading:
    """Result of reading a configuration.

    Attributes:
        plain: the correction's plain values.
        ignored: keys that correct nothing, but belong to the loss or have a name that suggests a correction, with their
            values.
        idle: keys of the correction that do not change the translation, with their values.
    """

    plain: dict[str, Any]
    ignored: dict[str, Any]
    idle: dict[str, Any]


def words(text: str, under: str = "") -> frozenset[str]:
    """Split a text into names, and prefix each name with a section.

    Example:
        >>> sorted(words("lr dtype", "actor"))
        ['actor.dtype', 'actor.lr']
    """
    return frozenset(f"{under}.{name}" if under else name for name in text.split())


@dataclass(frozen=True)
class Peer:
    """Table of a framework's keys, and how to read each key.

    Attributes:
        name, releases: the framework, and its releases whose keys are known.
        sections: paths under which every key is known; a configuration may also start at one of these paths, or between
            the root and one of them.
        read: each key that ``convert`` reads -> its default.
        convert: converts the values of ``read`` to our plain values.
        unsaid: each key of a correction that has no equivalent here -> the values that switch it off, and the reason.
        plain: keys that correct nothing, including all keys under them.
        elsewhere: final components of the paths of keys that correct nothing, in any section.
        switches: keys of ``read`` that mean "no correction" if they are switched off.
        context: keys of ``read`` that correct nothing on their own.
        mixed: sections that also contain keys unrelated to loss and correction; unlisted keys in them pass unless their
            names suggest a correction.
    """

    name: str
    releases: str
    sections: tuple[str, ...]
    read: Mapping[str, Any]
    convert: Callable[[Options], dict[str, Any]]
    unsaid: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()
    context: frozenset[str] = frozenset()
    mixed: tuple[str, ...] = ()

    def knows(self, path: str) -> bool:
        """Return True if the full path is in the table."""
        return path in self.read or bool(self._find(self.unsaid, path) or self._find(self.plain, path))

    def read_source(self, source: Any, ignore: frozenset[str] = frozenset()) -> Reading:
        """Read a whole configuration, a section or flat options, given as a mapping or as an object with attributes.

        Args:
            ignore: keys or sections, as given, that correct nothing according to the caller.

        Raises:
            SpecError: an unknown key that may concern a correction, a malformed value, a correction without an
                equivalent here, or a correction that the framework itself would not apply.
        """
        flat = flatten(source, self.name)
        document = {path: value for path, value in flat.items() if self._find(ignore, path) is None}
        included = document.pop("defaults", None)
        if included not in (None, [], ["_self_"]):
            reason = "the files that it names are not read, but may set a correction."
            fix = "Give the configuration as composed, or pass --ignore defaults if they set none."
            raise SpecError(reason, fix, key="defaults", value=included)
        start = self._find_start(list(document))
        below = tuple(f"{section}." for section in self.sections)
        given: dict[str, Any] = {}
        ignored: dict[str, Any] = {}
        for path, value in document.items():
            full = start + path
            if value not in (None, {}) and self._is_section(full):
                raise SpecError("expected a section of keys.", key=full, value=value)
            if full in self.read:
                given[full] = value
            elif self._find(self.read, full.rpartition(".")[0]) in given:
                continue  # inside a list, which its converter reads
            elif (owner := self._find(self.unsaid, full)) is not None:
                self._refuse(owner, full, value, document, start)
            elif (owner := self._find(self.plain, full)) is not None:
                ignored |= {owner: value} if full.startswith(below) or names_a_correction(path) else {}
            elif not self._is_section(full):
                owner = next((section for section in self.sections if full.startswith(f"{section}.")), "")
                ignored |= self._judge_unknown(path, full, value, owner)
        options = Options({**self.read, **given}, frozenset(given))
        plain = self.convert(options)
        idle = self._find_idle(options, given, plain)
        ignored |= {path: idle.pop(path) for path in list(idle) if path in self.context}
        return Reading(plain, ignored, idle)

    def _find_start(self, paths: list[str]) -> str:
        """Find the prefix missing from a configuration's paths: a section, the path above a section, or nothing."""
        owners = tuple(f"{section}." for section in self.sections)
        above = {owner[: place + 1] for owner in owners for place, letter in enumerate(owner) if letter == "."}
        for start in sorted({"", *above}, key=len):
            full = [start + path for path in paths]
            if start not in owners and any(f"{path}.".startswith(owners) for path in full):
                return start
            if start in owners and any(path in self.read or self._find(self.unsaid, path) for path in full):
                return start
        bare = owners and not any("." in path or self.knows(path) for path in paths)
        return owners[0] if bare else ""

    def _judge_unknown(self, path: str, full: str, value: Any, section: str) -> dict[str, Any]:
        """Return the key, to be listed, if it concerns no correction; raise ``SpecError`` if it may concern one."""
        inside = bool(section) and section not in self.mixed
        if not inside and not self.elsewhere.isdisjoint(path.split(".")):
            return {path: value}
        name = _to_snake(path.rpartition(".")[2])
        leaves = {each.rpartition(".")[2]: each for each in (*self.read, *self.unsaid)}
        long = [leaf for leaf in leaves if "_" in leaf and len(leaf) > 5]
        near = difflib.get_close_matches(name, leaves if inside else long, 1, cutoff=0.6 if inside else _NEAR)
        if near == [name] and leaves[name] in self.context:
            near = []
        same = [each for each in self.read if _end(each) == _end(path)]
        meant = next(iter([*same, *(leaves[leaf] for leaf in near)]), "")
        if "centering" in name:
            raise SpecError(SCORE_CENTERING[1], key=full, value=value)
        if inside or names_a_correction(path) or meant:
            guess = f"Did you mean {meant}? " if meant not in ("", path) else ""
            raise SpecError(
                f"unknown key; the releases of {self.name} that are known are {self.releases}.",
                f"{guess}If it corrects nothing, leave it out, or pass --ignore {path}.",
                key=full,
                value=value,
            )
        return {path: value} if section or _LOOSELY.search(name) else {}

    def _is_section(self, path: str) -> bool:
        return any(known.startswith(f"{path}.") for known in self.read)

    def _refuse(self, owner: str, full: str, value: Any, document: Mapping[str, Any], start: str) -> None:
        off, why = self.unsaid[owner]
        switched_off = document.get(f"{owner}.enabled".removeprefix(start)) is False
        if not switched_off and not any(_is_same(value, each) for each in off):
            raise SpecError(why, key=full, value=value)

    def _find_idle(self, options: Options, given: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
        """Find keys that have no effect; raise if there is no correction although nothing is switched off."""
        idle = {}
        for path, value in given.items():
            if path not in self.switches and not _is_same(value, self.read[path]):
                without = replace(
                    options, values={**options.values, path: self.read[path]}, given=options.given - {path}
                )
                try:
                    changes = self.convert(without) != plain
                except SpecError:
                    changes = True
                if not changes:
                    idle[path] = value
        off = any(path in self.switches and given[path] in (None, False, "off") for path in given)
        unread = [path for path in idle if path not in self.context]
        if unread and not off and plain == self.convert(Options(self.read)):
            path = unread[0]
            raise SpecError(
                f"{self.name} does not read it, because none of the keys that are set switches a correction on.",
                f"Set {' or '.join(sorted(self.switches - set(given)))}, or leave it out.",
                key=path,
                value=idle[path],
            )
        return idle

    @staticmethod
    def _find(known: Mapping[str, Any] | frozenset[str], path: str) -> str | None:
        """Find the entry for a path or for one of its parents."""
        while path:
            if path in known:
                return path
            path = path.rpartition(".")[0]
        return None


def flatten(source: Any, where: str) -> dict[str, Any]:
    """Flatten a configuration to full paths; ``--use-tis`` and ``+a.b`` are read as ``use_tis`` and ``a.b``.

    Example:
        >>> flatten({"actor": {"lr": 1.0, "norm": {}}, "--use-tis": True}, "slime")
        {'actor.lr': 1.0, 'actor.norm': {}, 'use_tis': True}
    """
    found: dict[str, Any] = {}
    for path, value in _walk(_to_mapping(source, where), ""):
        if path in found and not _is_same(found[path], value):
            raise SpecError(f"given twice, also as {found[path]}.", "Give it once.", key=path, value=value)
        found[path] = value
    return found


def _walk(mapping: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key in mapping:
        try:
            value = mapping[key]
        except Exception:  # raised by OmegaConf for a missing mandatory value or a failing interpolation
            value = _MISSING
        path = above + str(key).lstrip("-+").replace("-", "_")
        # Only a nested object's own attributes are read, because recursion into the attributes of a date or a path
        # would never end.
        own = getattr(value, "__dict__", None) or is_dataclass(value)
        nested = value if isinstance(value, Mapping) else _list_attributes(value) if own else {}
        value = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        if nested:
            yield from _walk(nested, f"{path}.")
            continue
        yield path, value
        for place, each in enumerate(value if isinstance(value, list) else ()):
            if isinstance(each, Mapping):
                yield from _walk(each, f"{path}.{place}.")
            elif isinstance(each, str) and each.startswith("--"):
                yield f"{path}.{each.lstrip('-').partition('=')[0].replace('-', '_')}", each


def _end(path: str) -> str:
    """Return the last two components of a path, such as ``loss.type``, in the tables' spelling."""
    return ".".join(_to_snake(path).split(".")[-2:])


def _to_mapping(source: Any, where: str) -> Mapping[Any, Any]:
    if isinstance(source, Mapping):
        return source
    attributes = _list_attributes(source)
    if not attributes:
        raise SpecError("expected a mapping of keys.", key=where, value=source)
    return attributes


def _list_attributes(source: Any) -> dict[str, Any]:
    """List the attributes of a configuration object; a plain value has none."""
    if source is None or isinstance(source, int | float | Sequence | Mapping | type):
        return {}
    names = list(vars(source)) if getattr(source, "__dict__", None) else dir(source)
    found = {name: getattr(source, name, None) for name in names if not name.startswith("_")}
    return {name: value for name, value in found.items() if not callable(value)}


def _is_same(value: Any, other: Any) -> bool:
    pair = [list(each) if isinstance(each, list | tuple) else each for each in (value, other)]
    return bool(pair[0] == pair[1]) and isinstance(pair[0], bool) == isinstance(pair[1], bool)
