"""Process rewards as an extension, which credits the differences of the prefix values that arrive with the rows.

Under an estimator that sums a row's rewards, the process advantages are added to the estimator's advantages, which stay
bitwise unchanged. For an estimator that uses the positions of rewards, the utilities are added to its rewards.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
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
from ...proof.token_alignment import AlignmentChecker
from ..advantage_proof import AdvantageExtension, AdvantageReport
from ..batch_view import BatchView, PromptView, read_agent_fields
from . import evidence, row_utilities
from .advantages import FIELD, UTILITY, normalize_utilities, token_advantages
from .evidence import ProcessWorker
from .monte_carlo import summarize_continuations
from .prefix_scorer import RowValues
from .row_utilities import BatchUtilities
from .settings import ProcessSettings
from .start_up import MANAGER, find_manager, find_problems, serve_scores

logger = logging.getLogger("verl.offpolicy")

UNFIT, UPDATES = 0.55, 5
"""Separation below which values do not distinguish passed from failed rows, and number of consecutive updates below
this separation before the warning."""

COMPARISONS = {True: 2, False: 16}
"""Number of initial steps whose values are compared. In synchronous training, these are the first step and the step
after the first synchronisation of trained weights, and their values must agree exactly. Otherwise, there are enough
steps to show that the values are related."""


class PrefixValueRewards(AdvantageExtension):
    """Extension for the process rewards of one run; see ``settings.ProcessSettings`` for its section."""

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
        self._apart, self._tolerance = math.nan, evidence.COARSE

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
        self._tolerance = evidence.TOLERANCES.get(dtype, evidence.COARSE)
        self._alignment = AlignmentChecker(
            bool(OmegaConf.select(config, "offpolicy.allow_unrelated_log_probs")),
            column="values of prefixes",
            short="the rollout engine",
            lost="the values credit no token correctly",
        )
        self._by_token = bool(sees_positions(config, plain_advantage()))
        serve_scores()

    def next_batch(self, prompts: PromptView) -> None:
        self._submitted = time.time()

    def on_rollout(self, batch: BatchView) -> None:
        alongside = read_agent_fields(batch, FIELD, NEWEST_VERSION)
        found = row_utilities.read_values([each.get(FIELD) for each in alongside])
        row_utilities.check_values(
            found,
            [_read_version(each) for each in alongside],
            expected=batch.step - 1 if self._synchronous else None,
            max_unscored_share=self.process.max_unscored_share,
        )
        mask = batch.rows("response_mask")["response_mask"]
        self._utilities = row_utilities.build_utilities(found, mask)
        self._waste = row_utilities.find_waste(self._utilities, self.process.waste.within, self.process.floor)
        check_rewards(batch.scores, batch.uids, f"step {batch.step}")
        scores = (batch.scores.double() * mask).sum(-1)
        self._metrics = row_utilities.summarize_values(self._utilities, scores)
        self._metrics |= row_utilities.summarize_waste(self._utilities, self._waste) | self._read_continuations(found)
        self._metrics |= row_utilities.summarize_cost(found, self._submitted if self._synchronous else None)
        lags = [batch.step - 1 - each.version for each in found if each.version is not None]
        self._metrics["version_lag"] = sum(lags) / len(lags) if lags else 0.0
        shown = torch.where(self._utilities.positions, self._utilities.values, torch.nan)
        batch.put(**{UTILITY: shown})
        self._at_floor = self._at_floor and all(value <= self.process.floor for row in found for value in row.values)
        all_zero, every = evidence.check_column(found, self.process.floor), self.process.probe_every
        first = self._comparisons < COMPARISONS[self._synchronous]
        if all_zero or first or (every is not None and batch.step >= self._compared_at + every):
            self._compare(batch, found)
        self._watch(self._metrics["value/separation"])

    def _read_continuations(self, found: Sequence[RowValues]) -> dict[str, float]:
        """Read the metrics of a Monte-Carlo check, and log the first reason why a prefix has no estimate."""
        metrics = summarize_continuations(found)
        self._continued = self._continued or metrics.get("monte_carlo/prefixes", 0.0) > 0
        if metrics.get("monte_carlo/lost") and not self._lost:
            results = [each.monte_carlo for each in found if each.monte_carlo]
            self._lost = next(str(each["error"]) for each in results if "error" in each)
            logger.warning("%s.monte_carlo: a prefix has no estimate: %s", self.section, self._lost)
        return metrics

    def _compare(self, batch: BatchView, found: Sequence[RowValues]) -> None:
        """Score a few prefixes again with the trainer's own forward pass."""
        chosen = evidence.choose_prefixes(found, self.process.floor, batch.step)
        if not chosen or (not self._synchronous and _has_media(batch)):
            return
        ids = batch.token_ids
        rows = [evidence.build_scored_row(found[row], number, *ids[row]) for row, number in chosen]
        pairs = [(prompt, response) for prompt, response, _ in rows]
        # A forward pass accepts at most as many rows as the batch contains.
        starts = range(0, len(pairs), len(found))
        log_probs = [own for at in starts for own in batch.compute_log_probs(pairs[at : at + len(found)])]
        own = evidence.average_answers(log_probs, [count for *_, count in rows])
        values = [found[row].values[number] for row, number in chosen]
        self._compared_at = batch.step
        if not self._synchronous:
            evidence.check_related(values, own, self._alignment)
            self._comparisons += 1
            self._compared += len(chosen)
            return
        apart = evidence.check_forward(values, own, self._tolerance)
        self._apart = apart if math.isnan(self._apart) else max(apart, self._apart)
        self._comparisons += 1
        self._compared += len(chosen)
        logger.info(
            "%s LIVE: %d values of the rollout engine match the trainer's own forward pass, to %.1g nats.",
            *(self.section, len(chosen), apart),
        )

    def _watch(self, separation: float) -> None:
        """Warn if, for a long time, the values of passed rows have not been higher than those of failed rows."""
        self._unfit = self._unfit + 1 if separation < UNFIT else 0
        if self._unfit == UPDATES:
            logger.warning(
                "%s: in %d updates the last values of passed sequences were higher than the last values of failed "
                "ones in only "
                "%.0f %% of pairs. Fix: set a %s.force_prompt in the format of the model's answers.",
                *(self.section, UPDATES, 100 * separation, self.section),
            )

    def _deal(self, batch: BatchView, mask: Tensor, values: Tensor, *, penalty: Tensor | float) -> Tensor:
        """Compute coef times the process advantages (n, T) of utilities (n, T); 0 in rows that must not receive any."""
        assert self._utilities is not None
        dealt = token_advantages(
            values.double(),
            self._utilities.positions,
            batch.uids,
            mask,
            normalize=self.process.normalize,
            penalty=penalty,
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
        deal = partial(self._deal, batch, mask, penalty=self._penalty)
        dealt = deal(self._utilities.values)
        if not self._moved:
            order = random.Random(batch.step).sample(range(len(mask)), len(mask))
            self._moved = evidence.check_moved(self._utilities, deal, order)
        if self.process.waste.penalty and bool(self._waste.any()):
            without = self._deal(batch, mask, self._utilities.values, penalty=0.0)
            there = mask.bool() if batch.silent is None else mask.bool() & ~batch.silent[:, None]
            lost = self.process.coef * self.process.waste.penalty
            evidence.check_penalty(self._utilities, self._waste, without - dealt, lost, there)
            self._penalised = True
        self._credited = self._credited or bool(dealt.any())
        self._metrics |= row_utilities.summarize_advantages(advantages, dealt, mask)
        return None if self._by_token else advantages + dealt.to(advantages.dtype)

    @property
    def _penalty(self) -> Tensor:
        """The amounts by which normalised utilities are lowered, (n, T) float64."""
        return self.process.waste.penalty * self._waste.double()

    def worker(self) -> ProcessWorker:
        return ProcessWorker()

    def judge(self, reports: Sequence[AdvantageReport]) -> Mapping[str, float]:
        live = {"moved_rows": self._moved, "compared_prefixes": self._compared, "forward_error": self._apart}
        return {f"{self.section}/live/{name}": float(value) for name, value in live.items()}

    def unproved(self) -> str | None:
        if self._credited:
            return self._say_unused()
        if self._at_floor:
            return (
                f"all values are at the floor, {self.process.floor:g} nats, so no episode is credited "
                f"({self.section}.floor, {self.section}.force_prompt)."
            )
        return f"no episode was credited, because no value differs from the previous one ({self.section}.force_prompt)."

    def _say_unused(self) -> str | None:
        process, section = self.process, self.section
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


def _read_version(fields: Mapping[str, Any]) -> int | None:
    version = fields.get(NEWEST_VERSION)
    return None if version is None else int(version)
