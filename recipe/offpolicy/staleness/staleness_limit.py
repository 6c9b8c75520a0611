"""The staleness limit for verl's asynchronous V1 trainers: limits how fast prompts are issued, and checks all ages.

Patched or read in verl 0.9.1, see ``verl_patches.trainer_seams``: ``_resolve_filter_groups_metric(self)``,
``_add_prompts_to_generate(self, num_prompts)`` and ``_restored_tq_prompt_count`` (set by ``_load_checkpoint``) of
``verl.trainer.ppo.v1.trainer_base.PPOTrainer``, and the hooks of the add-on. No other code issues prompts: verl's
warm-up, batches and replacements all call ``submit_prompts``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from tensordict import TensorDict

from verl.utils import tensordict_utils as tu

from ..batch.padding import put_columns, read_columns, zero_rows
from ..batch.weight_versions import EXTRA_FIELDS
from ..correction.decisions import assign_mini_batches
from ..extensions.add_on import AddOn
from ..fault_tolerance.checkpoints import find_changes, find_record, read_staleness
from ..fault_tolerance.state_schema import restoring
from ..proof.rollout_log_probs import SAMPLED, name_missing_column
from . import ages
from .ages import AgeLimit, RateLimit, RowTag
from .buffer import BoundedReplayBuffer, Tally
from .staleness_settings import ADAPT, ETA, TOO_OLD, EtaController, StalenessSettings

logger = logging.getLogger("verl.offpolicy")

_MASKS = ("response_mask", "loss_mask")
"""Columns that define the loss's tokens: verl's losses read the first column, and verl's engines count the tokens in
the second."""
_SEEN = "offpolicy/staleness/max"
"""Age of the oldest row in the loss, as reported by the workers."""
_MEAN = "offpolicy/staleness/mean"
_TOKENS = tuple(f"offpolicy/staleness/{age}/token_count" for age in ("is0", "is1", "is2", "ge3"))
_ESS = "offpolicy/weight/ess"
"""Effective sample size of the applied weights, over all updates of the step."""


class StalenessLimit(AddOn):
    """The feature behind ``offpolicy.staleness.eta``.

    Args:
        run: a run by an asynchronous V1 trainer.
        settings: settings of the limit.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, run: Any, settings: StalenessSettings) -> None:
        self._run, self.settings = run, settings
        self.rate_limit = RateLimit(settings.eta, run.config.data.train_batch_size)
        self.age_limit = AgeLimit(self.rate_limit.eta)
        self.controller = None if settings.adapt is None else EtaController(settings.adapt, self.rate_limit.eta)
        self.tally = Tally()
        self._updates_made = 0  # in the current step

    @property
    def _step(self) -> int:
        return self._run.global_steps

    def replay_buffer(self, build: Callable[[], Any]) -> BoundedReplayBuffer:
        settings, trainer = self.settings, self._run.trainer
        logger.info(
            "%s=%s, too_old=%s: this limit controls how many prompts are issued, so that sequences are at most %d "
            "versions old when they are trained on.",
            *(ETA, self._eta, settings.too_old, self.age_limit.oldest),
        )
        v1 = self._run.config.trainer.v1
        return BoundedReplayBuffer(
            settings,
            self.age_limit,
            self.tally,
            self._sample_anew,
            self.rate_limit.batch,
            trainer_mode=trainer.trainer_mode,
            trainer_config=v1.get(trainer.trainer_mode, {}),
            sampler_kwargs=v1.sampler.sampler_kwargs,
            refill_fn=self._replace_prompts,
            filter_groups_metric=trainer._resolve_filter_groups_metric(),
            sync_refill_failed_groups=bool(v1.sampler.get("sync_refill_failed_groups", False)),
        )

    @property
    def _eta(self) -> str:
        return ages.format_eta(self.rate_limit.eta)

    def warm_up_prompts(self, add: Callable[[Any], None], batches: Any) -> None:
        """Issue no prompts during the warm-up, because the first step can issue all of them."""

    def issue_prompts(self, add: Callable[[], None]) -> None:
        limit, step = self.rate_limit, self._step
        trained = (step - 1) * limit.batch
        if (lost := limit.account - trained - self._run.trainer.replay_buffer.count_prompts(step)) > 0:
            logger.warning(
                "%d prompts were lost before training, although they had not been evicted; new prompts replace them.",
                lost,
            )
            limit.left(lost)
            self.tally.lost += lost
        self.tally.room = max(limit.room(step), 0)
        self._fill()

    def _fill(self) -> None:
        if (room := self.rate_limit.room(self._step)) > 0:
            self._run.trainer._add_prompts_to_generate(room)

    def _replace_prompts(self, evicted: int) -> None:
        """Issue prompts to replace groups that verl has evicted."""
        self.rate_limit.left(evicted)
        self._fill()

    def submit_prompts(self, send: Callable[[TensorDict], int], batch: TensorDict) -> int:
        self.rate_limit.issued(len(batch), self._step)
        self.tally.issued += len(batch)
        return send(batch)

    def _sample_anew(self, prompts: TensorDict) -> None:
        """Issue prompts again; the account of the rate limit already includes them."""
        tu.assign_non_tensor_data(prompts, "global_steps", self._step)
        self._run.verls._submit_batch_to_rollout(prompts)

    def run_step(self, run: Callable[[], Any], metrics: dict[str, Any]) -> Any:
        self.tally.begin()
        self._updates_made = 0
        begun = self.clock()
        batch = run()
        self._run.trainer.replay_buffer.check_versions(self._step)
        waited = self.tally.waited / max(self.clock() - begun, self.tally.waited, 1e-9)
        metrics.update(self.tally.metrics(float(self.rate_limit.eta), waited))
        if self.controller is not None and (why := self.controller.observe(metrics.get(_ESS, math.nan), waited)):
            now = ages.format_eta(self.controller.eta)
            logger.info("%s: %s -> %s from the next step on: %s.", ETA, self._eta, now, why)
            self._change_eta(self._step + 1, self.controller.eta)
        return batch

    def _change_eta(self, step: int, eta: Fraction) -> None:
        """Set eta from ``step`` onwards."""
        self.rate_limit.eta = eta
        self.age_limit.change(step, eta)

    def old_log_prob(self, compute: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        self._check_noted(batch)
        return compute(batch)

    def _check_noted(self, batch: Any) -> None:
        """Check the versions that the servers and the client report."""
        with name_missing_column():
            columns = read_columns(batch, ages.RESPONSE_MASK, EXTRA_FIELDS)
        rows, turns = ages.read_tags(batch.keys, batch.tags), ages.list_turns(columns)
        ages.check_noted(rows, turns, ages.list_runs(columns[ages.RESPONSE_MASK]), self._step, self._eta)
        noted = (each for row, each in zip(rows, turns, strict=True) if each and not row.is_padding)
        self.tally.spans.add(map(ages.count_versions, noted))

    def _check_ages(self, batch: Any) -> tuple[list[RowTag], list[int], list[RowTag]]:
        """Check that no row in the loss is too old; return all rows, the positions of old rows, and the kept rows."""
        rows = ages.read_tags(batch.keys, batch.tags)
        too_old = ages.find_too_old(rows, self._step, self.age_limit) if self.settings.masks else []
        kept = [row for i, row in enumerate(rows) if i not in too_old and not row.is_padding]
        ages.check_ages(kept, self._step, self.age_limit)
        self.tally.add_rows(kept, [rows[i] for i in too_old], self._step)
        return rows, too_old, kept

    def update_actor(self, run: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        rows, too_old, kept = self._check_ages(batch)
        if too_old:
            batch, left = self._update_without(run, too_old, rows, batch)
            kept += left
        else:
            batch = run(batch)
        ages.check_seen(metrics.get(_SEEN), kept, self._step, self._eta)
        self.tally.add_ages(
            metrics.get(_MEAN, math.nan),
            sum(metrics.get(name, 0.0) for name in _TOKENS),
            update=self._updates_made,
            updates=self._run.trainer.parameter_sync_step,
        )
        self._updates_made += 1
        return batch

    def _update_without(
        self, run: Callable[[Any], Any], too_old: list[int], rows: list[RowTag], batch: Any
    ) -> tuple[Any, list[RowTag]]:
        """Run the update without rows that are too old; their rewards are already part of their groups' baselines.

        Returns:
            The batch with its original masks, and the rows that stay in the loss with an advantage of 0.
        """
        split = self._run.split_batch()
        groups = assign_mini_batches(len(rows), ranks=split.ranks, rows_a_mini_batch=split.mini_batch_rows)
        masked, silenced = ages.split_too_old(too_old, rows, groups.tolist())
        columns = read_columns(batch, *_MASKS, "advantages")
        without = {name: zero_rows(columns[name], [i in masked for i in range(len(rows))]) for name in _MASKS}
        silent = zero_rows(columns["advantages"], [i in silenced for i in range(len(rows))])
        batch = put_columns(batch, **without, advantages=silent)
        of_masked, of_silenced = ([batch.keys[i] for i in places] for places in (masked, silenced))
        why = f"too old, {TOO_OLD}={self.settings.too_old}"
        batch = self._run.take_out(batch, why, masked=of_masked, silenced=of_silenced)
        self._run.seal(batch, {"advantages": silent})
        if self._run.supervision.wants_sampled:
            # The proof must expect only the mu of these rows in the loss.
            self._run.supervision.sampled(read_columns(batch, *SAMPLED))
        batch = run(batch)
        # verl's own metrics cover all rows.
        return put_columns(batch, **{name: columns[name] for name in _MASKS}), [rows[i] for i in sorted(silenced)]

    @property
    def rate_limit_state(self) -> dict[str, Any]:
        state = self.rate_limit.state()
        if self.controller is not None:
            state |= {"adapt": asdict(self.controller.settings), "controller": self.controller.state()}
            state["changes"] = self.age_limit.state()
        return state

    def on_resumed(self) -> None:
        if step := self._step:
            waiting = self._run.trainer._restored_tq_prompt_count
            with restoring(lambda: find_record(self._run.config), "staleness"):
                self._resume(step, waiting, read_staleness(self._run.config) or {})

    def _resume(self, step: int, waiting: int, saved: Mapping[str, Any]) -> None:
        """Resume after ``step`` steps, with the restored prompts and the checkpoint's eta."""
        self.rate_limit.restore(step, waiting)
        if self.controller is not None and "adapt" in saved:
            if changed := find_changes(saved["adapt"], asdict(self.controller.settings), ADAPT):
                logger.warning("eta restarts at %s:%s", self._eta, "".join(f"\n  {line}" for line in changed))
            else:
                self.controller.restore(saved["controller"])
                self._change_eta(step + 1, self.controller.eta)
        self.age_limit.restore(step, before := saved.get("eta"), saved.get("changes", ()))
        if before != self._eta:
            logger.warning(
                "resuming with %s=%s, but the checkpoint was trained with %s. Restored sequences may be older than "
                "the new value allows.",
                *(ETA, self._eta, "verl's own keys" if before is None else before),
            )
        if (missing := saved.get("account", 0) - self.rate_limit.account) > 0:
            logger.warning("%d prompts were waiting when the checkpoint was saved, but were not restored.", missing)
