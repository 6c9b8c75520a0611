"""Process rewards as an extension; the reward of an episode is the difference between the values of two prefixes.

If the estimator sums a row's rewards, the process advantages are added to its advantages, which are otherwise bitwise
unchanged. If the estimator uses the positions of rewards, the utilities are added to its rewards.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from verl_patches.execution_path import live_path
from verl_patches.trainer_seams import plain_advantage

from ...batch.declared_keys import Configured
from ...batch.weight_versions import NEWEST_VERSION
from ...correction import Problem
from ...proof.rewards import check_rewards, sees_positions
from ...proof.rollout_log_probs import Column, check_arrived, check_zeros
from ...proof.token_alignment import AlignmentChecker, tally_agreements
from ...proof.verify import LivenessError
from ..advantage_proof import AdvantageExtension, AdvantageReport, AdvantageWorker
from ..batch_view import BatchView, PromptView, read_agent_fields
from . import utilities
from .prefix_scorer import FIELD, RowValues
from .settings import MANAGER, SECTION, ProcessSettings, find_manager, find_problems
from .utilities import UTILITY, BatchUtilities, normalize_utilities, token_advantages

logger = logging.getLogger("verl.offpolicy")

UNFIT, UPDATES = 0.55, 5
"""The run warns that values do not distinguish passed from failed rows if their separation is below ``UNFIT`` in
``UPDATES`` consecutive updates."""

COMPARISONS = {True: 2, False: 16}
"""Number of initial steps at which values are compared with the trainer's. In synchronous training, these are the first
step and the step after the first synchronisation of trained weights, and the values must agree exactly. Asynchronous
training needs more steps to show that the values are related."""


@dataclass(frozen=True)
class ProcessWorker(AdvantageWorker):
    """A worker part without settings: the trainer shapes the advantages, and verl's loss is unchanged."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {UTILITY: "increase in log p(answer) over the episode that ends here, in nats; NaN elsewhere"}


MOVED_ROWS = 8
"""Maximum number of rows in which the first update's check moves a utility."""
COMPARED = 8
"""Number of prefixes that the trainer's own forward pass scores again at the first step."""
TOLERANCES = {"float32": 1e-3, "fp32": 1e-3}
COARSE = 0.05
"""Nats by which values may differ from the trainer's, depending on the rollout's dtype; ``COARSE`` for 16 bits."""
COLUMN = Column(f"{SECTION}: values of prefixes", "Check the rollout engine's log.", LivenessError, 0.0)


def check_moved(found: BatchUtilities, deal: Callable[[Tensor], Tensor], rows: Sequence[int]) -> int:
    """Check that the position of a utility determines which tokens are credited.

    Args:
        found: utilities of the batch.
        deal: the run's function that computes process advantages (n, T) from utilities (n, T).
        rows: rows to check, in this order.

    Returns:
        Number of checked rows, at most ``MOVED_ROWS``. Rows without a second episode, or without an episode that
        counts, cannot be checked.

    Raises:
        LivenessError: a utility was moved to another episode, but no advantage changed.
    """
    dealt, seen = deal(found.values), 0
    for row in rows:
        moved = utilities.move_utility(found, row)
        if moved is None or not dealt[row].any():
            continue
        if torch.equal(deal(moved)[row], dealt[row]):
            moved_one = f"moving a utility of sequence {row} to another episode changed no advantage"
            raise LivenessError(f"{SECTION}: {moved_one}, so utilities are summed before they are assigned to tokens.")
        seen += 1
        if seen == MOVED_ROWS:
            break
    return seen


def choose_prefixes(rows: Sequence[RowValues], floor: float, seed: int) -> list[tuple[int, int]]:
    """Choose ``COMPARED`` random pairs (row, number of the value) whose values are not at the floor."""
    there = [(row, at) for row, each in enumerate(rows) for at, value in enumerate(each.values) if value > floor]
    return random.Random(seed).sample(there, min(COMPARED, len(there)))


def build_scored_row(
    each: RowValues, number: int, prompt: list[int], response: list[int]
) -> tuple[list[int], list[int], int]:
    """Build the prompt, response and answer length whose mean log-prob is the value with this number."""
    end = each.ends[number - 1] if number else 0
    ids, count = each.answers[each.best[number]]
    return prompt, [*response[:end], *ids], count


def check_column(rows: Sequence[RowValues], floor: float) -> bool:
    """Check that the values of a batch can be mean log-probs; values at the floor are ignored.

    Returns:
        Whether all values are exactly 0, which the trainer's own forward pass must confirm.

    Raises:
        LivenessError: a value is not finite or is above 0, or all values are the same number.
    """
    values = torch.tensor([[value for row in rows for value in row.values]])
    there = values != floor
    check_arrived(values, there, COLUMN)
    return bool(there.any()) and not values[there].any()


def check_related(values: Sequence[float], own: Sequence[float], checker: AlignmentChecker) -> None:
    """Check values from an engine with older weights: engine and trainer must rank prefixes similarly.

    Raises:
        LivenessError: all values are 0, although the trainer is not certain of the answers.
        AlignmentError: the rankings of enough prefixes agree no better than by chance.
    """
    engine, trainer = torch.tensor(values)[:, None], torch.tensor(own)[:, None]
    there = torch.ones_like(engine, dtype=torch.bool)
    check_zeros(engine, trainer, there, COLUMN)
    checker.judge(tally_agreements(trainer, engine, there))


def check_forward(values: Sequence[float], own: Sequence[float], tolerance: float) -> float:
    """Check values of the rollout engine against the trainer's own forward pass.

    Args:
        values: V of each prefix.
        own: V of the same prefixes, computed by the trainer.
        tolerance: largest accepted difference, in nats.

    Returns:
        The largest difference, in nats.

    Raises:
        LivenessError: the values differ by more than the tolerance.
    """
    apart = [abs(one - other) for one, other in zip(values, own, strict=True)]
    # NaN counts as the worst value.
    worst = max(range(len(apart)), key=lambda at: math.inf if math.isnan(apart[at]) else apart[at])
    if not apart[worst] <= tolerance:
        one = f"one has the value {own[worst]:.4f} instead of {values[worst]:.4f} (allowed: {tolerance:g} nats)"
        reason = "the rollout engine has different weights, or reads a stale prefix cache"
        raise LivenessError(f"{SECTION}: of {len(values)} prefixes that the trainer scored again, {one}: {reason}.")
    return apart[worst]


def serve_scores() -> None:
    """Make the vLLM replicas that this process starts score prefixes."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> Any:
        from .scoring_server import ScoringReplica

        return ScoringReplica

    RolloutReplicaRegistry.register("vllm", load)


class PrefixValueRewards(AdvantageExtension):
    """Extension for process rewards; ``settings.ProcessSettings`` describes its section."""

    phase = "prefix_values"

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.process = ProcessSettings.from_mapping(section, settings)
        self._by_token = self._synchronous = False
        self._submitted: float | None = None
        self._utilities: BatchUtilities | None = None
        self._metrics: dict[str, float] = {}
        self._moved = self._unfit = self._compared = self._comparisons = self._compared_at = 0
        self._alignment = AlignmentChecker()
        self._credited, self._at_floor = False, True
        self._waste = torch.zeros(0, 0, dtype=torch.bool)
        self._penalised = self._continued = False
        self._lost = ""
        self._apart, self._tolerance = math.nan, COARSE

    # Before Ray starts --------------------------------------------------------------------------------------

    @property
    def meaning(self) -> str:
        process = self.process
        return (
            f"log p(answer | prefix), {process.normalize}, coef={process.coef:g}, at most {process.max_episodes} "
            f"episodes of {process.max_tokens} tokens"
        )

    @property
    def replay_note(self) -> str:
        return "the run's advantages, including their process part, are replayed unchanged."

    def configure(self, config: DictConfig) -> Sequence[str]:
        if OmegaConf.select(config, MANAGER):  # ``problems`` rejects a user's own manager
            return ()
        manager = find_manager(config)
        with open_dict(config):
            OmegaConf.update(config, MANAGER, manager, force_add=True)
        return (f"{self.section}: {MANAGER} is {manager}; values are computed at temperature 1.",)

    @property
    def noted(self) -> Mapping[str, Any]:
        """All settings except those of the proof."""
        return {name: value for name, value in self.settings.items() if name != "probe_every"}

    def problems(self, config: DictConfig) -> Iterable[Problem]:
        return find_problems(self.section, self.process, Configured(config, self.section))

    # In the trainer -----------------------------------------------------------------------------------------

    def begin(self, config: DictConfig) -> None:
        self._synchronous = not live_path(config).asynchronous
        dtype = str(OmegaConf.select(config, "actor_rollout_ref.rollout.dtype"))
        self._tolerance = TOLERANCES.get(dtype, COARSE)
        self._alignment = AlignmentChecker(
            bool(OmegaConf.select(config, "offpolicy.allow_unrelated_log_probs")),
            column="values of prefixes",
            short="the rollout engine",
            lost="the values cannot credit any token correctly",
        )
        self._by_token = bool(sees_positions(config, plain_advantage()))
        serve_scores()

    def next_batch(self, prompts: PromptView) -> None:
        self._submitted = time.time()

    def on_rollout(self, batch: BatchView) -> None:
        alongside = read_agent_fields(batch, FIELD, NEWEST_VERSION)
        found = utilities.read_values([each.get(FIELD) for each in alongside])
        versions = [None if (each := fields.get(NEWEST_VERSION)) is None else int(each) for fields in alongside]
        expected, most = batch.step - 1 if self._synchronous else None, self.process.max_unscored_share
        utilities.check_values(found, versions, expected=expected, max_unscored_share=most)
        mask = batch.rows("response_mask")["response_mask"]
        self._utilities = utilities.build_utilities(found, mask)
        self._waste = utilities.find_waste(self._utilities, self.process.waste.within, self.process.floor)
        check_rewards(batch.scores, batch.uids, f"step {batch.step}")
        scores = (batch.scores.double() * mask).sum(-1)
        self._metrics = utilities.summarize_values(self._utilities, scores)
        self._metrics |= utilities.summarize_waste(self._utilities, self._waste) | self._read_continuations(found)
        self._metrics |= utilities.summarize_cost(found, self._submitted if self._synchronous else None)
        lags = [batch.step - 1 - each.version for each in found if each.version is not None]
        self._metrics["version_lag"] = sum(lags) / len(lags) if lags else 0.0
        shown = torch.where(self._utilities.positions, self._utilities.values, torch.nan)
        batch.put(**{UTILITY: shown})
        self._at_floor = self._at_floor and all(value <= self.process.floor for row in found for value in row.values)
        all_zero, every = check_column(found, self.process.floor), self.process.probe_every
        first = self._comparisons < COMPARISONS[self._synchronous]
        if all_zero or first or (every is not None and batch.step >= self._compared_at + every):
            self._score_again(batch, found)
        self._watch(self._metrics["value/separation"])

    def _watch(self, separation: float) -> None:
        """Warn if passed rows have not had higher values than failed rows for many updates."""
        self._unfit = self._unfit + 1 if separation < UNFIT else 0
        if self._unfit == UPDATES:
            logger.warning(
                "%s: in %d updates the last values of passed sequences were higher than the last values of failed "
                "ones in only %.0f %% of pairs. Fix: set %s.force_prompt in the format of the model's answers.",
                *(self.section, UPDATES, 100 * separation, self.section),
            )

    def _read_continuations(self, found: Sequence[RowValues]) -> dict[str, float]:
        """Compute the metrics of a Monte-Carlo check; log the first reason for a missing estimate."""
        metrics = utilities.summarize_continuations(found)
        self._continued = self._continued or metrics.get("monte_carlo/prefixes", 0.0) > 0
        if metrics.get("monte_carlo/lost") and not self._lost:
            results = [each.monte_carlo for each in found if each.monte_carlo]
            self._lost = next(str(each["error"]) for each in results if "error" in each)
            logger.warning("%s.monte_carlo: a prefix has no estimate: %s", self.section, self._lost)
        return metrics

    def _score_again(self, batch: BatchView, found: Sequence[RowValues]) -> None:
        """Score a few prefixes again with the trainer's own forward pass."""
        chosen = choose_prefixes(found, self.process.floor, batch.step)
        if not chosen or (not self._synchronous and _has_media(batch)):
            return
        ids = batch.token_ids
        rows = [build_scored_row(found[row], number, *ids[row]) for row, number in chosen]
        pairs = [(prompt, response) for prompt, response, _ in rows]
        # A forward pass accepts at most as many rows as the batch contains.
        starts = range(0, len(pairs), len(found))
        log_probs = [own for at in starts for own in batch.compute_log_probs(pairs[at : at + len(found)])]
        own = [math.fsum(each[-count:]) / count for each, (*_, count) in zip(log_probs, rows, strict=True)]
        values = [found[row].values[number] for row, number in chosen]
        self._compared_at = batch.step
        self._comparisons += 1
        self._compared += len(chosen)
        if not self._synchronous:
            check_related(values, own, self._alignment)
            return
        apart = check_forward(values, own, self._tolerance)
        self._apart = apart if math.isnan(self._apart) else max(apart, self._apart)
        logger.info(
            "%s LIVE: %d values of the rollout engine match the trainer's own forward pass, to %.1g nats.",
            *(self.section, len(chosen), apart),
        )

    def _deal(self, batch: BatchView, mask: Tensor, values: Tensor) -> Tensor:
        """Compute the process advantages of utilities, times coef, (n, T); 0 in rows that must not receive any."""
        assert self._utilities is not None
        dealt = token_advantages(
            values.double(),
            self._utilities.positions,
            batch.uids,
            mask,
            normalize=self.process.normalize,
            penalty=self._penalty,
        )
        if batch.silent is not None:
            dealt = dealt.masked_fill(batch.silent[:, None], 0.0)
        return self.process.coef * dealt

    def shape_rewards(self, batch: BatchView, rewards: Tensor) -> Tensor | None:
        if not self._by_token:
            return None
        assert self._utilities is not None
        found = self._utilities
        dealt = normalize_utilities(found.values, found.positions, batch.uids, normalize=self.process.normalize)
        return rewards + (self.process.coef * (dealt - self._penalty)).to(rewards.dtype)

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        assert self._utilities is not None
        mask = batch.rows("response_mask")["response_mask"]
        deal = partial(self._deal, batch, mask)
        dealt = deal(self._utilities.values)
        if not self._moved:
            order = random.Random(batch.step).sample(range(len(mask)), len(mask))
            self._moved = check_moved(self._utilities, deal, order)
        if self.process.waste.penalty and bool(self._waste.any()):
            self._penalised = True
        self._credited = self._credited or bool(dealt.any())
        self._metrics |= utilities.summarize_advantages(advantages, dealt, mask)
        return None if self._by_token else advantages + dealt.to(advantages.dtype)

    @property
    def _penalty(self) -> Tensor:
        """The penalties to subtract from normalised utilities, (n, T) float64."""
        return self.process.waste.penalty * self._waste.double()

    def worker(self) -> ProcessWorker:
        return ProcessWorker()

    def judge(self, reports: Sequence[AdvantageReport]) -> Mapping[str, float]:
        live = {"moved_rows": self._moved, "compared_prefixes": self._compared, "forward_error": self._apart}
        return {f"{self.section}/live/{name}": float(value) for name, value in live.items()}

    def unproved(self) -> str | None:
        process, section = self.process, self.section
        if not self._credited and self._at_floor:
            floor = f"all values are at the floor, {process.floor:g} nats, so no episode is credited"
            return f"{floor} ({section}.floor, {section}.force_prompt)."
        if not self._credited:
            return f"no episode was credited, because no value differs from the previous one ({section}.force_prompt)."
        if process.waste.penalty and not self._penalised:
            return f"no utility is within {process.waste.within:g} nats of 0, so none is penalised ({section}.waste)."
        if process.monte_carlo.every is not None and not self._continued:
            reason = self._lost or "no sequence was chosen"
            return f"no prefix has a Monte-Carlo value: {reason} ({section}.monte_carlo)."
        return None

    def metrics(self) -> Mapping[str, float]:
        return {f"{self.section}/{name}": value for name, value in self._metrics.items()}


def _has_media(batch: BatchView) -> bool:
    """Return True if a row has images, videos or audio, which a forward pass over its tokens would ignore."""
    try:
        return any(batch.rows("multi_modal_inputs")["multi_modal_inputs"])
    except KeyError:
        return False
