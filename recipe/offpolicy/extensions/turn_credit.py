"""Turn-level credit as an extension, which replaces verl's estimator and computes one advantage per turn.

``turn_index`` compares the discounted return of a turn with the returns of the turns with the same number in sibling
rollouts. ``return_to_go`` normalises turn rewards over all turns of the group and rollout rewards over its rollouts,
and then sums them from each turn to the end of the rollout (process supervision in GRPO: DeepSeekMath, arXiv
2402.03300, section 4.1.3, with a turn as the step).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from verl_patches import rollout_seams
from verl_patches.contract import check_all

from ..batch.declared_keys import Configured, Key, Rule, number
from ..correction import Problem
from ..correction.units import turns
from ..proof.rewards import measure_spread
from ..proof.verify import LivenessError
from .advantage_proof import AdvantageExtension
from .batch_view import BatchView, Sessions, read_agent_fields, read_sessions
from .setting_checks import SectionSettings, divides_by_std, find_no_groups

Normalize = Literal["turn_index", "return_to_go"]


def compute_advantages(
    counts: Tensor,
    rewards: Tensor,
    scores: Tensor | None,
    *,
    normalize: Normalize,
    coef: float = 1.0,
    gamma: float = 1.0,
    by_std: bool = True,
) -> Tensor:
    """Compute the advantage of each turn of one group, (R, K) float64, 0 after a rollout's last turn.

    Args:
        counts: (R,) int64, number of turns in each rollout, at most K.
        rewards: (R, K) float64, rewards of turns; NaN where a turn has no reward.
        scores: (R,) float64, reward of each rollout, added to its last turn; None: rollout rewards are not used.
        coef: factor of ``rewards``.
        gamma: discount per turn.
        by_std: True to divide by the standard deviation after subtracting the mean.

    Example:
        >>> turns = torch.tensor([[1.0, math.nan], [0.0, math.nan]]).double()
        >>> ends = torch.tensor([0.0, 2.0]).double()
        >>> compute_advantages(torch.tensor([2, 2]), turns, ends, normalize="turn_index", by_std=False).tolist()
        [[-0.5, -1.0], [0.5, 1.0]]
    """
    place = torch.arange(rewards.shape[1])
    there, last = place < counts[:, None], place == counts[:, None] - 1
    paid = there & ~torch.isnan(rewards)
    whole = torch.zeros(len(counts), dtype=torch.float64) if scores is None else scores
    if normalize == "turn_index":
        returns = _discount(torch.where(paid, coef * rewards, 0.0) + last * whole[:, None], gamma)
        dealt = torch.zeros_like(returns)
        for k in range(rewards.shape[1]):
            dealt[there[:, k], k] = _standardise(returns[there[:, k], k], by_std)
        return dealt
    credit = torch.zeros_like(rewards)
    credit[paid] = coef * _standardise(rewards[paid], by_std)
    credit[last] += _standardise(whole[counts > 0], by_std)
    return torch.where(there, _discount(credit, gamma), 0.0)


def _discount(values: Tensor, gamma: float) -> Tensor:
    """Add to each (R, K) value the discounted later values in its row."""
    summed = values.clone()
    for k in range(values.shape[1] - 2, -1, -1):
        summed[:, k] += gamma * summed[:, k + 1]
    return summed


def _standardise(values: Tensor, by_std: bool) -> Tensor:
    """Subtract the mean and divide by the standard deviation; 0 for a single value or for equal values."""
    if len(values) < 2:
        return torch.zeros_like(values)
    above = values - values[0]
    centred = above - above.mean()
    return centred * measure_spread(values, centred=True).invert() if by_std else centred


_FIELDS = (None, "tool_rewards", "turn_scores")
_REWARDS = Key(lambda value: value in _FIELDS, "tool_rewards, turn_scores or null")
_RULES = (
    Rule(
        "episode",
        lambda values: not values["episode"] and values["turn_rewards"] is None,
        "without turn rewards, the run has no reward.",
        lambda values: True,
        "turn_rewards",
    ),
    Rule(
        "coef",
        lambda values: values["coef"] != 1.0 and values["turn_rewards"] is None,
        "there are no turn rewards to multiply by this factor.",
        lambda values: 1.0,
        "turn_rewards",
    ),
)
ROLLOUT = "actor_rollout_ref.rollout"
GAMMA = "algorithm.gamma"


@dataclass(frozen=True)
class TurnSettings(SectionSettings):
    """Settings of turn-level credit.

    Attributes:
        normalize: how turns are compared, see ``turn_credit``.
        turn_rewards: field of the agent loop's output that contains the turn rewards; None for no turn rewards.
        episode: whether the rollout's reward is added to its last turn.
        coef: factor of the turn rewards.
    """

    option, needed, rules = "turn_credit/turn_index", "normalize", _RULES
    normalize: Normalize
    turn_rewards: Annotated[str | None, _REWARDS]
    episode: bool
    coef: Annotated[float, number("a number above 0", above=0)]


class TurnCredit(AdvantageExtension):
    """Extension for turn-level credit; ``TurnSettings`` describes its section."""

    # Turn advantages equal GRPO's if all rollouts of a group have the same number of turns.
    title, prefix, differs = "turn-level credit", "turn_credit", False

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.turn = TurnSettings.from_mapping(section, settings)
        self._gamma, self._by_std = 1.0, True
        self._several = False

    def problems(self, config: DictConfig) -> Iterator[Problem]:
        run, section, turn = Configured(config, self.section), self.section, self.turn
        yield from find_no_groups(section, run)
        loop = run.get(agent := f"{ROLLOUT}.agent.default_agent_loop") or "single_turn_agent"
        if loop == "single_turn_agent":
            reason = "each rollout of this agent loop is a single turn, so all its tokens have the same advantage."
            fix = f"Set {agent}=tool_agent, unless the data's agent_name names an agent loop, or {section}=null."
            yield run.problem(agent, reason, fix, verdict="NO-OP", value=loop)
        key, named = f"{ROLLOUT}.multi_turn.max_parallel_calls", f"{section}.turn_rewards"
        if turn.turn_rewards == "tool_rewards" and int(run.get(key) or 1) > 1:
            reason = "verl lists tool rewards without their turns, so a turn that calls several tools is ambiguous."
            yield run.problem(key, reason, f"Set {key}=1, or {named}=null.")
        filled = run.get(f"{ROLLOUT}.multi_turn.interaction_config_path")
        if turn.turn_rewards == "turn_scores" and loop == "tool_agent" and not filled:
            reason = "tool_agent fills turn_scores only from interactions, which verl supports up to 0.7.1."
            yield run.problem(named, reason, sets={named: "tool_rewards"}, value="turn_scores", alongside=[agent])
        if turn.normalize == "return_to_go" and turn.turn_rewards is None and run.get(GAMMA) in (None, 1):
            reason = "without turn rewards and without a discount, all turns of a rollout have GRPO's advantage."
            fix = f"Set {named}=tool_rewards, {GAMMA}=0.9, or {section}=turn_index."
            yield run.problem(named, reason, fix, verdict="NO-OP", value=None)

    def begin(self, config: DictConfig) -> None:
        if self.turn.turn_rewards is not None:
            check_all(rollout_seams.TURNS)
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
        self._demanded, lone = "", 0
        varied: list[bool] = []
        for name, members in sessions.groups().items():
            at = torch.tensor([member for member in members if counts[member] > 0], dtype=torch.int64)
            dealt[at] = compute_advantages(
                counts[at],
                earned[at],
                None if scores is None else scores[at],
                normalize=self.turn.normalize,
                coef=self.turn.coef,
                gamma=self._gamma,
                by_std=self._by_std,
            )
            sizes = counts[at].tolist()
            seen = [row[:size] for row, size in zip(dealt[at].tolist(), sizes, strict=True)]
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
        """Read the turn rewards, (S, K) float64, NaN for a turn without a reward.

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
            given = torch.tensor(fields[name], dtype=torch.float64)
            if not bool(torch.isfinite(given).all()):
                what = f"{name} of sequence {row} are {fields[name]}"
                raise LivenessError(f"{self.section}: {what}: expected finite numbers.")
            if number and len(given) not in (number - 1, number):
                raise LivenessError(
                    f"{self.section}: sequence {row} has {number} turns and {len(given)} {name}, but each turn except "
                    f"the last needs one. Fix: return a reward from each tool, or set {self.section}.turn_rewards=null."
                )
            if number:
                found[session, first[session] : first[session] + len(given)] = given
            first[session] += number
        return found

    def unproved(self) -> str | None:
        if self._proved:
            return None
        if not self._several:
            return "no rollout had more than one turn (actor_rollout_ref.rollout.multi_turn)."
        return f"the turns of each rollout had equal advantages ({self.section}.turn_rewards)."


def _number_turns(mask: Tensor, sessions: Sessions) -> tuple[Tensor, Tensor, Tensor]:
    """Number the turns of each session over its rows, (n, T) per token; also return turn counts, (n,) and (S,)."""
    index = turns(mask)
    of_row = torch.where(mask.any(-1), index.amax(-1) + 1, 0)
    counts = torch.zeros(len(sessions.last), dtype=torch.int64)
    for row, session in enumerate(sessions.of_row.tolist()):
        index[row] += counts[session]
        counts[session] += of_row[row]
    return torch.where(mask, index, 0), of_row, counts
