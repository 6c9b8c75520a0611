"""Settings of process rewards, as the section ``process_reward`` of the configuration has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from ...correction import SpecError
from .advantages import Normalize

MARKERS = ("Wait,", "Alternatively,", "Actually,", "Hmm,", "Let me ", "I need to ", "So ", "But ")


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of one run.

    Attributes:
        force_prompt: text between a prefix and the answer.
        think_end: nothing behind it is an episode; empty: the whole response is reasoning.
        markers, max_tokens, max_episodes: see ``episodes.episode_ends``.
        max_answer_tokens: of the answer, tokenised with the force prompt.
        max_answers: alternatives in the ground truth, of which the likeliest counts.
        floor: nats that a value counts as at least.
        prefix_cache: ``auto`` lets the engine read its cache where it says how much it read, ``off`` never.
        normalize: see ``advantages.normalize_utilities``.
        coef: factor of the process advantages.
        max_unscored_share: rows without values that a step may have.
    """

    force_prompt: str = "</think>\n\nThe answer is "
    think_end: str = "</think>"
    markers: tuple[str, ...] = MARKERS
    max_tokens: int = 256
    max_episodes: int = 16
    max_answer_tokens: int = 32
    max_answers: int = 4
    floor: float = -20.0
    prefix_cache: str = "auto"
    normalize: str = "zscore"
    coef: float = 1.0
    max_unscored_share: float = 0.0

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> ProcessSettings:
        """Read the section.

        Raises:
            SpecError: an unknown key, or a value that cannot be what was meant.
        """
        for name, value in values.items():
            key = f"{section}.{name}"
            if name not in _KEYS:
                fix = f"Known under {section}: {', '.join(_KEYS)}."
                raise SpecError("unknown key.", fix, key=key, value=value, removed={key: value})
            fits, wanted = _KEYS[name]
            if not fits(value):
                default = next(each.default for each in fields(cls) if each.name == name)
                mend = list(default) if isinstance(default, tuple) else default
                raise SpecError(f"expected {wanted}.", key=key, value=value, mend={key: mend})
        given = dict(values)
        if "markers" in given:
            given["markers"] = tuple(given["markers"])
        return cls(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_markers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value)


_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "force_prompt": (lambda value: isinstance(value, str) and value != "", "a text"),
    "think_end": (lambda value: isinstance(value, str), "a text, which may be empty"),
    "markers": (_are_markers, "a list of texts, none of them empty"),
    "max_tokens": (_is_count, "a number of tokens, 1 or more"),
    "max_episodes": (_is_count, "a number of episodes, 1 or more"),
    "max_answer_tokens": (_is_count, "a number of tokens, 1 or more"),
    "max_answers": (_is_count, "a number of answers, 1 or more"),
    "floor": (lambda value: _is_number(value) and value < 0, "nats below 0"),
    "prefix_cache": (lambda value: value in ("auto", "off"), "auto or off"),
    "normalize": (lambda value: value in get_args(Normalize), f"one of {', '.join(get_args(Normalize))}"),
    "coef": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "max_unscored_share": (lambda value: _is_number(value) and 0 <= value < 1, "a share in [0, 1)"),
}
