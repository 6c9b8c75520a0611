"""Settings of process rewards (the section ``process_reward`` of the configuration)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from ...batch.declared_keys import Key, choice, count, number
from ..setting_checks import build_settings, read_values
from .advantages import Normalize


@dataclass(frozen=True)
class WasteSettings:
    """Settings of the penalty on wasted episodes; see ``ProcessSettings.waste``."""

    within: float
    penalty: float


@dataclass(frozen=True)
class MonteCarloSettings:
    """Settings of the Monte-Carlo checks of values.

    Attributes:
        every: number of weight versions between two checks; None: never.
        share: fraction of the rows that take part in a check, each with one prefix.
        samples: number of rollouts from each prefix.
    """

    every: int | None
    share: float
    samples: int


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of process rewards.

    Attributes:
        force_prompt: text between a prefix and the answer.
        think_end: text before which episodes end; if empty, the whole response is reasoning.
        markers, max_tokens, max_episodes: see ``prefix_scorer.episode_ends``.
        max_answer_tokens: maximum number of tokens of the answer, tokenised with the force prompt.
        max_answers: maximum number of alternative answers in the ground truth; the likeliest answer counts.
        floor: lower bound of a value, in nats.
        prefix_cache: with ``auto``, the engine may read its cache if it reports how many tokens it has read; with
            ``off``, it may not.
        normalize: see ``advantages.normalize_utilities``.
        coef: factor of the process advantages.
        probe_every: number of steps after which the trainer scores prefixes again; None: only at the first steps.
        max_unscored_share: largest share of rows without values in a step.
        waste: ``penalty`` is subtracted, after normalisation, from an episode whose utility is at most ``within`` nats
            from 0.
        monte_carlo: see ``MonteCarloSettings``.
    """

    force_prompt: str
    think_end: str
    markers: tuple[str, ...]
    max_tokens: int
    max_episodes: int
    max_answer_tokens: int
    max_answers: int
    floor: float
    prefix_cache: str
    normalize: str
    coef: float
    probe_every: int | None
    max_unscored_share: float
    waste: WasteSettings
    monte_carlo: MonteCarloSettings

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> ProcessSettings:
        """Read the settings from the values of the section.

        Raises:
            CheckError: unknown keys, or invalid values.
        """
        given = build_settings(cls, read_values(section, values, "process_reward/prefix_value", KEYS))
        return replace(given, markers=tuple(given.markers))


def _are_markers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value)


KEYS = {
    "force_prompt": Key(lambda value: isinstance(value, str) and value != "", "a text"),
    "think_end": Key(lambda value: isinstance(value, str), "a text, which may be empty"),
    "markers": Key(_are_markers, "a list of texts, none of them empty"),
    "max_tokens": count("a number of tokens, 1 or more"),
    "max_episodes": count("a number of episodes, 1 or more"),
    "max_answer_tokens": count("a number of tokens, 1 or more"),
    "max_answers": count("a number of answers, 1 or more"),
    "floor": number("a number of nats below 0", below=0),
    "prefix_cache": choice("auto", "off"),
    "normalize": choice(*get_args(Normalize)),
    "coef": number("a number above 0", above=0),
    "probe_every": count("a number of steps, 1 or more, or null", null=True),
    "max_unscored_share": number("a share in [0, 1)", 0, below=1),
    "waste.within": number("a number of nats, 0 or more", 0),
    "waste.penalty": number("a number, 0 or more", 0),
    "monte_carlo.every": count("a number of versions, 1 or more, or null", null=True),
    "monte_carlo.share": number("a share in (0, 1]", most=1, above=0, read_with=("monte_carlo.every", ...)),
    "monte_carlo.samples": count("a number of rollouts, 1 or more", read_with=("monte_carlo.every", ...)),
}
