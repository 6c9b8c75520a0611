"""Schemas of this package's files in checkpoints: the keys of each file, and the types and ranges of their values."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

FIX = "Restore the file from a copy, or resume another checkpoint: trainer.resume_mode=resume_path."
LARGEST = 1e9
"""Largest bound, length or number of tokens; ratios are clamped at e^20."""
OLDEST = 10_000
"""Largest eta, in batches."""


class CheckpointError(RuntimeError):
    """The run cannot resume from a checkpoint; the message says why and what to do."""


@dataclass(frozen=True)
class Value:
    """A single value, defined by a predicate that accepted values satisfy and by a description."""

    fits: Callable[[Any], bool]
    what: str


@dataclass(frozen=True)
class Keys:
    """A mapping with all required keys and any of the optional keys; other keys are rejected."""

    needed: Mapping[str, Any]
    optional: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """A mapping from names to values of one kind."""

    of: Any


@dataclass(frozen=True)
class Items:
    """A list of at least ``least`` values of one kind. A tuple of kinds means a list with one value of each kind."""

    of: Any
    least: int = 0


@dataclass(frozen=True)
class Null:
    """A value of this kind, or null."""

    of: Any


def number(least: float = -LARGEST, most: float = LARGEST) -> Value:
    """Build a kind that accepts finite numbers in this range."""

    return Value(lambda value: REAL.fits(value) and least <= value <= most, f"a number in [{least:g}, {most:g}]")


def whole(least: int = 0) -> Value:
    """Build a kind that accepts whole numbers."""

    return Value(
        lambda value: REAL.fits(value) and isinstance(value, int) and least <= value < 2**63,
        f"a whole number, {least} or more",
    )


def _is_eta(value: Any) -> bool:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return isinstance(value, str) and len(value) < 40 and 0 <= Fraction(value) <= OLDEST
    return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _is_rate(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2 and all(number(0).fits(each) for each in value)
    return pair and value[1] <= value[0] * (1 + 1e-9)


FLAG = Value(lambda value: isinstance(value, bool), "true or false")
TEXT = Value(lambda value: isinstance(value, str), "a text")
REAL = Value(lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number, finite or not")
COUNT, NUMBER, SHARE = whole(), number(), number(0, 1 + 1e-6)
ETA = Value(_is_eta, f"a number of batches as a text, 0 to {OLDEST}")
PLAIN = Value(_is_plain, "plain values with finite numbers")
SETTINGS = Named(PLAIN)

_RATE_LIMIT = Keys(
    {"eta": ETA, "account": COUNT},
    {
        "adapt": Keys(
            {name: number(0) for name in ("ess", "trainer_wait", "floor", "ceiling", "every", "patience", "step")}
        ),
        "controller": Keys(
            {
                "eta": ETA,
                "window": Items((SHARE, SHARE)),
                "since": COUNT,
                "unsettled": COUNT,
                "low": COUNT,
                "lacked": Null(SHARE),
                "demanded": number(0, 2),
            }
        ),
        "changes": Items((COUNT, ETA), least=1),
    },
)
_SEEN = Value(
    lambda value: _is_plain(value) and isinstance(value, list | Mapping),
    "a list of parts, or a mapping of bins with counts",
)
_STEERING = Keys(
    {
        "alarms": Keys(
            {
                "in_force": TEXT,
                "updates": COUNT,
                "past": Items(REAL),
                "alarms": Named(Keys({"firing": FLAG, "beyond": COUNT, "calm": COUNT, "values": Items(REAL)})),
            },
            {"rules": Named(SETTINGS)},
        ),
        "fallback": Null(SETTINGS),
        "calibrate": SETTINGS,
        "calibration": Null(
            Keys(
                {
                    "bounds": Named(Keys({}, dict.fromkeys(("lower", "upper", "delta"), Null(NUMBER)))),
                    "window": Items(Named(_SEEN)),
                    "updates": COUNT,
                }
            )
        ),
    }
)
RECORD = Keys(
    {"step": COUNT, "complete": FLAG, "correction": SETTINGS, "fingerprint": COUNT},
    {
        "steering": _STEERING,
        "extensions": Named(Keys({"settings": SETTINGS, "state": SETTINGS})),
        "staleness": _RATE_LIMIT,
    },
)
"""Schema of ``offpolicy.json``."""
SAVING = Keys({"step": COUNT, "tracked": Null(COUNT)})
"""Schema of ``offpolicy_saving.json``."""
ANCHORS = Keys(
    {
        "frozen": Named(Keys({"length": number(1), "step": COUNT, "answers": whole(1)})),
        "open": Named(Items(Items((FLAG, number(0)), least=1), least=1)),
    }
)
"""Schema of ``length_penalty/anchors.json``."""
CLASSES = Keys({"step": COUNT, "classes": Named(Value(lambda value: value in ("easy", "hard", "other"), "a class"))})
"""Schema of ``length_penalty/classes.json``."""
PASS_RATES = Keys(
    {
        "counts": Named(Value(_is_rate, "a number of answers, and a number of correct ones that is not larger")),
        "prior": (number(1e-300), number(1e-300)),
    }
)
"""Schema of ``pass_at_k/pass_rates.json``."""


def check_state(schema: Any, value: Any, path: Path, key: str = "") -> None:
    """Check a restored value against its schema.

    Args:
        path: path of the file, for the error.
        key: key of the value within the file.

    Raises:
        CheckpointError: the value does not match; the message names the file, the key, the value and what to do.
    """
    if isinstance(schema, Null):
        if value is not None:
            check_state(schema.of, value, path, key)
    elif isinstance(schema, Value):
        if not schema.fits(value):
            refuse(path, key, value, f"expected {schema.what}")
    elif isinstance(schema, Items | tuple):
        least = len(schema) if isinstance(schema, tuple) else schema.least
        if not isinstance(value, list) or len(value) < least or (isinstance(schema, tuple) and len(value) > least):
            size = f" of {least}{'' if isinstance(schema, tuple) else ' or more'}" if least else ""
            refuse(path, key, value, f"expected a list{size}")
        kinds = schema if isinstance(schema, tuple) else [schema.of] * len(value)
        for place, (kind, each) in enumerate(zip(kinds, value, strict=True)):
            check_state(kind, each, path, f"{key}[{place}]")
    elif not isinstance(value, Mapping):
        refuse(path, key, value, "expected a mapping")
    elif isinstance(schema, Named):
        for name, each in value.items():
            check_state(schema.of, each, path, _join(key, name))
    else:
        known = {**schema.needed, **schema.optional}
        for name in schema.needed.keys() - value.keys():
            refuse(path, _join(key, name), None, "the key is missing")
        for name, each in value.items():
            if name not in known:
                refuse(path, _join(key, name), each, "the key is unknown")
            check_state(known[name], each, path, _join(key, name))


def refuse(path: Path, key: str, value: Any, why: str) -> None:
    """Reject a value in a checkpoint.

    Raises:
        CheckpointError: always.
    """
    shown = json.dumps(value, default=repr)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise CheckpointError(f"{path}: {key or 'the file'}={shown}: {why}. {FIX}")


@contextlib.contextmanager
def restoring(find_path: Callable[[], Path], key: str) -> Iterator[None]:
    """Add the file and the key to the error if a state passes its schema but cannot be restored.

    Args:
        find_path: returns the path of the file; called only if there is an error.

    Raises:
        CheckpointError: the state cannot be restored.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{key} cannot be restored ({type(error).__name__}: {error})"
        raise CheckpointError(f"{find_path()}: {reason}. {FIX}") from error


def read_json(path: Path, schema: Any) -> Any:
    """Read a file and check it against its schema.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is not JSON, or does not match the schema.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). {FIX}") from error
    check_state(schema, content, path)
    return content


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else str(name)
