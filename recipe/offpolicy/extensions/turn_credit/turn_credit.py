"""Turn-level credit as an extension: one advantage for each turn of a rollout, instead of verl's estimator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from verl_patches import agent_loops, engine_loss

from ...batch.configured import Configured
from ...batch.declared_keys import Key, Rule, choice, flag, number
from ...correction import Problem
from ...correction.units import turns
from ...proof.verify import LivenessError
from ..advantage_proof import AdvantageExtension
from ..batch_view import BatchView, read_agent_fields
from ..sessions import Sessions, read_sessions
from ..setting_checks import divides_by_std, find_no_groups, read_values
from .formula import Normalize, compute_advantages, find_difference

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
        "without turn rewards there is no reward at all.",
        lambda values: True,
        "turn_rewards",
    ),
    Rule(
        "coef",
        lambda values: values["coef"] != 1.0 and values["turn_rewards"] is None,
        "there are no turn rewards to multiply.",
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
        normalize: how turns are compared, see ``formula``.
        turn_rewards: field of verl's agent loop output with the turn rewards; None: there are none.
        episode: whether the rollout's reward counts, as a reward of its last turn.
        coef: factor of the turn rewards.
    """

    normalize: Normalize
    turn_rewards: str | None
    episode: bool
    coef: float


class TurnCredit(AdvantageExtension):
    """Turn-level credit of one run; see ``TurnSettings`` for its section."""

    # Equal to GRPO's advantages if all rollouts of a group have the same number of turns.
    title, prefix, differs = "turn-level credit", "turn_credit", False

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        fix = f"Set {section}=turn_index, or {section}=return_to_go."
        named = ("normalize", "no normalisation is set.", fix)
        self.turn = TurnSettings(**read_values(section, settings, "turn_credit/turn_index", KEYS, _RULES, named))
        self._gamma, self._by_std = 1.0, True
        self._several = False

    def problems(self, config: DictConfig) -> Iterator[Problem]:
        run, section, off = Configured(config, self.section), self.section, f"{self.section}=null"
        yield from find_no_groups(section, run)
        loop = run.get(agent := f"{ROLLOUT}.agent.default_agent_loop") or "single_turn_agent"
        if loop == "single_turn_agent":
            reason = (
                "a rollout of this agent loop is one turn, so its tokens have one advantage, as without turn-level "
                "credit."
            )
            fix = f"Set {agent}=tool_agent, unless the data set names an agent loop by row (agent_name), or {off}."
            yield run.problem(agent, reason, fix, verdict="NO-OP", value=loop)
        key, named = f"{ROLLOUT}.multi_turn.max_parallel_calls", f"{section}.turn_rewards"
        if self.turn.turn_rewards == "tool_rewards" and int(run.get(key) or 1) > 1:
            reason = (
                "verl returns the tools' rewards in one list, so the turn of each reward is unknown if a turn calls "
                "several tools."
            )
            yield run.problem(key, reason, f"Set {key}=1, or {named}=null.")
        rewarded = self.turn.turn_rewards is not None or run.get(GAMMA) not in (None, 1)
        filled = f"{ROLLOUT}.multi_turn.interaction_config_path"
        if self.turn.turn_rewards == "turn_scores" and loop == "tool_agent" and not run.get(filled):
            reason = (
                "tool_agent fills turn_scores only from interactions, which verl supports up to 0.7.1, so no turn "
                "has a reward."
            )
            yield run.problem(named, reason, sets={named: "tool_rewards"}, value="turn_scores", alongside=[agent])
        if self.turn.normalize == "return_to_go" and not rewarded:
            reason = "without turn rewards and without a discount, all turns of a rollout have GRPO's advantage."
            fix = f"Set {named}=tool_rewards, {GAMMA}=0.9, or {section}=turn_index."
            yield run.problem(named, reason, fix, verdict="NO-OP", value=None)

    def begin(self, config: DictConfig) -> None:
        if self.turn.turn_rewards is not None:
            engine_loss.check(agent_loops.TURN_SEAMS)
        gamma = OmegaConf.select(config, GAMMA)
        self._gamma = 1.0 if gamma is None else float(gamma)
        self._by_std = divides_by_std(Configured(config))

    def estimate(self, batch: BatchView, rewards: Tensor) -> Tensor:
        sessions = read_sessions(batch)
        mask = batch.rows("response_mask")["response_mask"].bool()
        index, of_row, counts = _number_turns(mask, sessions)
        earned = self._read_rewards(batch, sessions, of_row.tolist(), counts)
        scores = rewards.double().sum(-1)[sessions.last] if self.turn.episode else None
        dealt = torch.zeros_like(earned)
        how: dict[str, Any] = {"normalize": self.turn.normalize, "coef": self.turn.coef, "gamma": self._gamma}
        how["by_std"] = self._by_std
        self._demanded, lone = "", 0
        varied: list[bool] = []
        for name, members in sessions.groups().items():
            at = torch.tensor([member for member in members if counts[member] > 0], dtype=torch.int64)
            of_group = None if scores is None else scores[at]
            dealt[at] = compute_advantages(counts[at], earned[at], of_group, **how)
            sizes = counts[at].tolist()
            seen, given = (
                [row[:size] for row, size in zip(each[at].tolist(), sizes, strict=True)] for each in (dealt, earned)
            )
            plain = None if of_group is None else of_group.tolist()
            self._require(name, find_difference(seen, given, plain, **how))
            lone += sum(sum(size > k for size in sizes) == 1 for k in range(max(sizes, default=0)))
            varied += [max(row) > min(row) for row in seen]
            self._several = self._several or max(sizes, default=0) > 1
            if not self._demanded and any(varied):
                self._demanded = f"group {name}: {seen}"
        total = float(counts.sum())
        self._found = {
            "turn_credit/turns": total / max(len(counts), 1),
            "turn_credit/rewarded_share": float((~torch.isnan(earned)).sum()) / total if total else math.nan,
            "turn_credit/varied_share": sum(varied) / len(varied) if varied else math.nan,
            "turn_credit/lone_turns": float(lone),
        }
        by_token = dealt[sessions.of_row[:, None], index].to(rewards.dtype)
        return torch.where(mask, by_token, 0.0)

    def _read_rewards(self, batch: BatchView, sessions: Sessions, of_row: Sequence[int], counts: Tensor) -> Tensor:
        """Read the turn rewards, (S, K) float64; NaN where a turn has none.

        Raises:
            LivenessError: turn rewards are missing, or cannot be assigned to turns.
        """
        most = max([1, *counts.tolist()])
        found = torch.full((len(counts), most), math.nan, dtype=torch.float64)
        if (name := self.turn.turn_rewards) is None:
            return found
        first = [0] * len(counts)
        for row, fields in enumerate(read_agent_fields(batch, name)):
            number, session = of_row[row], int(sessions.of_row[row])
            if fields.get(name) is None:
                raise LivenessError(
                    f"{self.section}: verl's agent loop returned no {name} for sequence {row}. Fix: use an agent loop "
                    f"that returns it in extra_fields, such as tool_agent, or set {self.section}.turn_rewards=null."
                )
            given = self._to_numbers(fields[name], f"{name} of sequence {row}")
            if number and len(given) not in (number - 1, number):
                raise LivenessError(
                    f"{self.section}: sequence {row} has {number} turns and {len(given)} {name}, but each turn except "
                    f"the last needs one. Fix: return a reward from each tool, or set {self.section}.turn_rewards="
                    f"null."
                )
            if number:
                found[session, first[session] : first[session] + len(given)] = given
            first[session] += number
        return found

    def _to_numbers(self, given: Any, what: str) -> Tensor:
        """Convert an agent loop's returned values to (n,) float64.

        Raises:
            LivenessError: the values are not a list of finite numbers.
        """
        try:
            found = torch.tensor([float(each) for each in given], dtype=torch.float64)
        except (TypeError, ValueError):
            found = torch.full((1,), math.nan)
        if not bool(torch.isfinite(found).all()):
            raise LivenessError(f"{self.section}: {what} are {given}: expected finite numbers.")
        return found

    def unproved(self) -> str | None:
        if self._proved:
            return None
        if not self._several:
            return "no rollout had more than one turn (actor_rollout_ref.rollout.multi_turn)."
        return f"the turns of each rollout had equal advantages ({self.section}.turn_rewards)."


def _number_turns(mask: Tensor, sessions: Sessions) -> tuple[Tensor, Tensor, Tensor]:
    """Number turns over a session's rows, (n, T) per token; also return turn counts per row (n,) and session (S,)."""
    index = turns(mask)
    of_row = torch.where(mask.any(-1), index.amax(-1) + 1, 0)
    counts = torch.zeros(len(sessions.last), dtype=torch.int64)
    for row, session in enumerate(sessions.of_row.tolist()):
        index[row] += counts[session]
        counts[session] += of_row[row]
    return torch.where(mask, index, 0), of_row, counts
