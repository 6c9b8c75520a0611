"""Settings of process rewards, as the section ``process_reward`` of the configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ..setting_checks import Rule, check_keys, is_count, is_number, is_positive, optional
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
        probe_every: steps after which the trainer scores prefixes again; None: at the first steps alone.
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
    probe_every: int | None = 50
    max_unscored_share: float = 0.0

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> ProcessSettings:
        """Read the section.

        Raises:
            SpecError: an unknown key, or a value that cannot be what was meant.
        """
        given = check_keys(section, values, _KEYS)
        if "markers" in given:
            given["markers"] = tuple(given["markers"])
        return cls(**given)


def _are_markers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value)


_KEYS: Mapping[str, Rule] = {
    "force_prompt": (lambda value: isinstance(value, str) and value != "", "a text", ProcessSettings.force_prompt),
    "think_end": (lambda value: isinstance(value, str), "a text, which may be empty", "</think>"),
    "markers": (_are_markers, "a list of texts, none of them empty", list(MARKERS)),
    "max_tokens": (is_count, "a number of tokens, 1 or more", 256),
    "max_episodes": (is_count, "a number of episodes, 1 or more", 16),
    "max_answer_tokens": (is_count, "a number of tokens, 1 or more", 32),
    "max_answers": (is_count, "a number of answers, 1 or more", 4),
    "floor": (lambda value: is_number(value) and value < 0, "nats below 0", -20.0),
    "prefix_cache": (lambda value: value in ("auto", "off"), "auto or off", "auto"),
    "normalize": (lambda value: value in get_args(Normalize), f"one of {', '.join(get_args(Normalize))}", "zscore"),
    "coef": (is_positive, "a number above 0", 1.0),
    "probe_every": (optional(is_count), "a number of steps, 1 or more, or null", 50),
    "max_unscored_share": (lambda value: is_number(value) and 0 <= value < 1, "a share in [0, 1)", 0.0),
}
