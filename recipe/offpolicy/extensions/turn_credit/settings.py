"""Settings of turn-level credit, the section ``turn_credit``, and its start-up checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...batch.declared_keys import Key, Rule, choice, flag, number
from ...correction import Problem, SpecError
from ...correction.requirement import find_unmet
from ..setting_checks import OWN_ESTIMATE, read_values
from .formula import Normalize

FIELDS = ("tool_rewards", "turn_scores")
KEYS = {
    "normalize": choice("turn_index", "return_to_go"),
    "turn_rewards": Key(lambda value: value in (None, *FIELDS), f"{', '.join(FIELDS)} or null"),
    "episode": flag(),
    "coef": number("a number above 0", above=0),
}
_RULES = (
    Rule(
        "episode",
        lambda values: not values["episode"] and values["turn_rewards"] is None,
        "without rewards of turns there is no reward at all.",
        lambda values: True,
        "turn_rewards",
    ),
    Rule(
        "coef",
        lambda values: values["coef"] != 1.0 and values["turn_rewards"] is None,
        "there are no rewards of turns to multiply.",
        lambda values: 1.0,
        "turn_rewards",
    ),
)
ROLLOUT = "actor_rollout_ref.rollout"
GAMMA = "algorithm.gamma"


@dataclass(frozen=True)
class TurnSettings:
    """Settings of one run.

    Attributes:
        normalize: what a turn is compared with, see ``formula``.
        turn_rewards: field of verl's agent loop with the rewards of turns; None: none.
        episode: the rollout's reward counts, as one of its last turn.
        coef: factor of the rewards of turns.
    """

    normalize: Normalize
    turn_rewards: str | None
    episode: bool
    coef: float

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> TurnSettings:
        """Read the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = read_values(section, values, "turn_credit/turn_index", KEYS, _RULES)
        if "normalize" not in values:
            key, fix = f"{section}.normalize", f"Set {section}=turn_index, or {section}=return_to_go."
            raise SpecError("no normalisation is named.", fix, key=key, proposed={key: "turn_index"})
        return cls(**given)


def find_problems(section: str, settings: TurnSettings, config: DictConfig) -> Iterator[Problem]:
    """Find conflicts with the configuration."""
    read, off, parts = partial(OmegaConf.select, config), f"{section}=null", (section,)
    yield from find_unmet(OWN_ESTIMATE, read, off, parts)
    key = f"{ROLLOUT}.n"
    if int(read(key) or 1) == 1:
        reason = "a group of one has no sibling to compare with."
        yield Problem(key, read(key), reason, f"Set {key}=8, or {off}.", "NO-OP", parts)
    key = f"{ROLLOUT}.agent.default_agent_loop"
    if read(key) in (None, "single_turn_agent"):
        reason = (
            "a rollout of this agent loop is one turn, so its tokens have one advantage, as without turn-level credit."
        )
        fix = f"Set {key}=tool_agent, unless the data set names an agent loop by row (agent_name), or {off}."
        yield Problem(key, read(key) or "single_turn_agent", reason, fix, "NO-OP", parts)
    key = f"{ROLLOUT}.multi_turn.max_parallel_calls"
    if settings.turn_rewards == "tool_rewards" and int(read(key) or 1) > 1:
        reason = "verl returns the tools' rewards in one list, so the turn of each is unknown if a turn calls several."
        yield Problem(key, read(key), reason, f"Set {key}=1, or {section}.turn_rewards=null.", "ERROR", parts)
    gamma = read(GAMMA)
    if settings.normalize == "return_to_go" and settings.turn_rewards is None and gamma in (None, 1):
        reason = "without rewards of turns and without a discount, all turns of a rollout have GRPO's advantage."
        fix = f"Set {section}.turn_rewards=tool_rewards, {GAMMA}=0.9, or {section}=turn_index."
        yield Problem(f"{section}.turn_rewards", None, reason, fix, "NO-OP", parts)
