"""Tables of other frameworks' keys, their reader, and builders of our plain values.

The reader never silently ignores a key that concerns a correction.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Final

from ..problem import SpecError
from ..ratios import EXP_CLAMP
from ..validation import read_number

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
"""Entry of ``unsaid``: the values that switch the key off, and the reason why there is no equivalent."""
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
class Options:
    """Values of the keys that a converter reads, by full path; an error shows the framework's own key and value.

    Attributes:
        values: values of all these keys, with the framework's default for a key that is not given.
        given: the keys that are given.

    Example:
        >>> options = Options({"tis": True, "cap": 2, "level": "token"})
        >>> options.flag("tis"), options.bound("cap"), options.choice("level", "token", "sequence")
        (True, 2.0, 'token')
    """

    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()

    def __getitem__(self, path: str) -> Any:
        return self.values[path]

    def has_section(self, path: str) -> bool:
        """Return True if a section is given and not null; it may be empty."""
        below = any(each.startswith(f"{path}.") for each in self.given)
        return below or (path in self.given and self.values[path] is not None)

    def refuse(self, key: str, reason: str, fix: str = "", also: str = "") -> SpecError:
        """Build the error for an option without an equivalent here; ``also`` is another key on which the option
        depends."""
        alongside = {also: self.values[also]} if also else None
        return SpecError(reason, fix, key=key, value=self.values[key], alongside=alongside)

    def choice(self, key: str, *known: str) -> str:
        """Read one of the known values."""
        if (value := self.values[key]) not in known:
            raise self.refuse(key, "no such choice.", f"Set one of {', '.join(known)}.")
        return known[known.index(value)]

    def choice_or_null(self, key: str, *known: str) -> str | None:
        """Read one of the known values, or null."""
        if (value := self.values[key]) not in (None, *known):
            raise self.refuse(key, "no such choice.", f"Set one of null, {', '.join(known)}.")
        return None if value is None else known[known.index(value)]

    def flag(self, key: str) -> bool:
        """Read True or False from a key that has a default."""
        if not isinstance(value := self.values[key], bool):
            raise self.refuse(key, "not a truth value.", "Set true or false.")
        return value

    def number(self, key: str) -> float | None:
        """Read a finite number, or null."""
        return read_number(self.values[key], key)

    def width(self, key: str) -> float:
        """Read a number of at least 0 from a key that has a default."""
        width = self.number(key)
        if width is None or width < 0:
            raise self.refuse(key, "expected a number of at least 0.")
        return width

    def bound(self, key: str, *, zero_opens: bool = False) -> float | None:
        """Read a bound on a ratio; with ``zero_opens``, 0 leaves the side open, as null does."""
        return None if zero_opens and self.number(key) == 0 else read_ratio_bound(self.values[key], key)

    def check_weight_of_rows(self, weight: Mapping[str, Any] | None, name: str, key: str) -> None:
        """Reject per-token or per-turn weights for a base loss that differentiates one mean ratio per row.

        With such a loss, the sum of a row's weights scales the gradient of the whole row, whereas verl's ``gspo``
        multiplies the gradient of each token by that token's weight.
        """
        if weight is not None and weight["level"] != "sequence":
            reason = (
                f"{name} multiplies the gradient of a row's ratio by the weights of its tokens, whereas verl's gspo "
                "multiplies each token's own gradient."
            )
            raise self.refuse(key, reason)


@dataclass(frozen=True)
class Reading:
    """Result of reading a configuration.

    Attributes:
        plain: the correction's plain values.
        ignored: keys that correct nothing, but belong to the loss or have a name that suggests a correction, with their
            values.
        idle: keys of the correction that have no effect on the translation, with their values.
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
        elsewhere: last components of keys that correct nothing in any section.
        switches: keys of ``read`` that mean "no correction" if they are switched off.
        context: keys of ``read`` that correct nothing on their own.
        mixed: sections that also contain keys unrelated to loss and correction; their unlisted keys are accepted unless
            the name suggests a correction.
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
            SpecError: a key is unknown but may concern a correction, a value is malformed, a correction has no
                equivalent here, or the framework itself would not apply the correction.
        """
        flat = flatten(source, self.name)
        document = {path: value for path, value in flat.items() if self._find(ignore, path) is None}
        included = document.pop("defaults", None)
        if included not in (None, [], ["_self_"]):
            reason = "the files named by this key are not read here, but may set a correction."
            fix = "Pass the composed configuration, or pass --ignore defaults if the files set no correction."
            raise SpecError(reason, fix, key="defaults", value=included)
        start = self._find_start(list(document))
        below = tuple(f"{section}." for section in self.sections)
        given: dict[str, Any] = {}
        ignored: dict[str, Any] = {}
        for path, value in document.items():
            full = start + path
            if value not in (None, {}) and self._is_section(full):
                raise SpecError("expected a section with keys.", key=full, value=value)
            if full in self.read:
                given[full] = value
            elif self._find(self.read, full.rpartition(".")[0]) in given:
                continue  # inside a list, which the converter reads
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
                f"unknown key; the known releases of {self.name} are {self.releases}.",
                f"{guess}If this key corrects nothing, remove it, or pass --ignore {path}.",
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
        """Find keys that have no effect; raise an error if there is no correction although nothing is switched off."""
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
                f"{self.name} does not read this key, because no key that switches a correction on is set.",
                f"Set {' or '.join(sorted(self.switches - set(given)))}, or remove this key.",
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


def read_ratio_bound(value: Any, key: str) -> float | None:
    """Read a bound on a ratio, which must lie within the clamp of +-20 nats to have an effect.

    Example:
        >>> read_ratio_bound(2, "tis.cap")
        2.0
    """
    bound = read_number(value, key)
    if bound is not None and bound <= 0:
        fix = "Set a bound above 0, or null to leave a side open."
        raise SpecError("ratios are positive.", fix, key=key, value=value)
    if bound is not None and abs(math.log(bound)) > EXP_CLAMP:
        reason = f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, so this bound has no effect."
        fix = f"Set a bound between {math.exp(-EXP_CLAMP):.3g} and {math.exp(EXP_CLAMP):.3g}."
        raise SpecError(reason, fix, key=key, value=value)
    return bound


def build_mask(
    level: str, aggregate: str, lower: float | None, upper: float | None, ratio: str = "rollout"
) -> dict[str, Any]:
    """Build the plain values of a mask that applies to advantages of either sign.

    Example:
        >>> build_mask("token", "product", 0.5, 2.0)["when"]
        'any'
    """
    bounds = {"lower": lower, "upper": upper}
    return {"ratio": ratio, "level": level, "aggregate": aggregate, "when": "any", **bounds}


def build_opsm(delta: float, ratio: str = "full", sign: str = "row") -> dict[str, Any]:
    """Build the plain values of off-policy sequence masking.

    Example:
        >>> build_opsm(0.1)["delta"]
        0.1
    """
    opsm = {"ratio": ratio, "level": "sequence", "aggregate": "geometric", "delta": delta, "when": "negative"}
    return opsm | {"sign": sign}


def build_dppo_masks(low: float, high: float) -> dict[str, Any]:
    """Build masks that drop tokens whose p_pi is over ``high`` above or ``low`` below p_mu and would move further away.

    For a width of 1 or more, no mask is built, because no difference of probabilities exceeds such a width.

    Example:
        >>> list(build_dppo_masks(0.2, 1.0))
        ['dppo_negative']
    """
    up = build_mask("token", "binary_tv", None, high, "full") | {"when": "positive", "sign": "token"}
    down = build_mask("token", "binary_tv", -low, None, "full") | {"when": "negative", "sign": "token"}
    return ({"dppo_positive": up} if high < 1 else {}) | ({"dppo_negative": down} if low < 1 else {})


def build_weight(
    level: str, lower: float | None, upper: float | None, *, reject: bool = False, **more: Any
) -> dict[str, Any]:
    """Build the plain values of a weight with the given bounds; a lower bound of 0 leaves that side open.

    Example:
        >>> build_weight("token", 0.0, 2.0)["kind"], build_weight("token", 0.5, 2.0)["kind"]
        ('truncate', 'clip')
    """
    lower = lower or None
    kind = "reject" if reject else "truncate" if lower is None or upper is None else "clip"
    return {"level": level, "kind": kind, "lower": lower, "upper": upper, **more}
