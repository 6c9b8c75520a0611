"""A run with verl's V1 trainer. It sends the loss to the workers, and stops unless the loss is proved to take effect.

Patched functions in verl 0.9.1: ``METHODS`` of ``verl.trainer.ppo.v1.trainer_base.PPOTrainer``, and
``RayWorkerGroup.set_loss_fn(loss_fn)`` / ``.update_actor(batch)`` / ``.compute_log_prob(batch)`` of the actor's worker
group. ``parameter_sync_step`` is the number of updates per step. Columns are read and written with TransferQueue's
``kv_batch_get(keys, partition_id, select_fields)`` and ``kv_batch_put(keys, partition_id, fields)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor

from verl.workers.utils.padding import response_from_nested

from ..batch.micro_batch import ROLLOUT_LOG_PROBS
from ..batch.padding import FORWARD, put_columns, read_columns
from ..batch.plan import COLUMNS, PLAN, columns_to_seal
from ..batch.seals import INPUT, INPUT_COLUMNS, PLAN_HASH, SealedRows, hash_model_input, key_of, seal_constant
from ..batch.weight_versions import (
    EXTRA_FIELDS,
    NEWEST_VERSION,
    OLDEST_VERSION,
    TOKEN_VERSIONS_SEALED,
    VERSIONS_SEALED,
    find_token_versions,
)
from ..preflight.composed import Composed
from ..proof.rollout_log_probs import ALIGNED, SAMPLED, name_missing_column
from ..worker.verl_workers import adopt
from .batch_view import (
    MEDIA,
    Pair,
    TensorDictPrompts,
    TransferQueueBatch,
    build_nested,
    demand_text,
    pad_rows,
)
from .corrected_run import CorrectedRun

OWN_PARTITION = "offpolicy"
"""Partition of TransferQueue for rows that do not belong to any batch."""
OF_A_FORWARD = ("uid", "position_ids", MEDIA)
"""Columns that workers may read in addition to the token columns."""


class CorrectedV1(CorrectedRun):
    """One run with a V1 trainer of verl or a subclass."""

    METHODS: ClassVar[tuple[str, ...]] = (
        *CorrectedRun.METHODS,
        "init",
        "on_init_end",
        "get_llm_client",
        "step",
        "_init_resource_pool_mgr",
        "_build_replay_buffer",
        "_add_async_warmup_batches",
        "_add_batch_to_generate",
        "_submit_batch_to_rollout",
        "_next_train_batch",
        "_compute_old_log_prob",
        "_compute_ref_log_prob",
        "_compute_advantage",
        "_update_actor",
    )
    _sealed: SealedRows | None = None
    _sealed_by_workers: tuple[str, ...] = ()

    def init(self) -> None:
        self._begin()
        self.verls.init()

    def on_init_end(self) -> None:
        self._begin_supervision()
        if self._resumed is not None:
            self._restore_active(self._resumed)
        self._hand_over_loss()
        self.workers.compute_log_prob = self.cost.counted(self.workers.compute_log_prob)
        adopt(self.workers, self._update_and_collect)
        self.verls.on_init_end()

    def _init_resource_pool_mgr(self) -> None:
        self.verls._init_resource_pool_mgr()
        self._choose_actor_class()

    def get_llm_client(self) -> Any:
        client = self.verls.get_llm_client()
        if Composed(self.config).notes_token_versions:
            # This module is imported only when needed, because other releases may lack its dependencies.
            from ..staleness.client import note_versions

            client = note_versions(client)
        return self.add_ons.replace("rollout_client", client)

    def _build_replay_buffer(self) -> Any:
        return self.add_ons.wrap("replay_buffer", self.verls._build_replay_buffer)()

    def _add_async_warmup_batches(self, num_warmup_batches: Any) -> None:
        self.add_ons.wrap("warm_up_prompts", self.verls._add_async_warmup_batches)(num_warmup_batches)

    def _add_batch_to_generate(self) -> None:
        self.add_ons.wrap("issue_prompts", self.verls._add_batch_to_generate)()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        return self.add_ons.wrap("submit_prompts", self.verls._submit_batch_to_rollout)(batch)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        return self.add_ons.wrap("run_step", partial(self._run_step, metrics, timing_raw), metrics)()

    def _run_step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self.supervision.begin_step()
        self.cost.begin()
        batch = self.verls.step(metrics, timing_raw)
        # If a step makes several updates, verl averages their metrics or takes their maximum, depending on the metric's
        # name.
        metrics.update(self.supervision.step_metrics() | self.cost.metrics())
        return batch

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch: TensorDict = self.verls._next_train_batch(num_prompts)
        self.add_ons.next_batch(TensorDictPrompts(batch, self.global_steps))
        return batch

    def view(self, batch: Any) -> TransferQueueBatch:
        """Build the add-ons' view of a batch."""

        def note(columns: Mapping[str, Tensor]) -> None:
            self.cost.add_columns(columns)
            self.seal(batch, columns)

        return TransferQueueBatch(batch, self.global_steps, note, self._compute_log_probs, self._decide)

    def _read_rows(self, batch: Any) -> TensorDict:
        return read_columns(batch, *COLUMNS)

    def seal(self, batch: Any, columns: Mapping[str, Tensor]) -> None:
        """Store checksums of the columns of all rows, so that the loss stops the run if it later reads other values."""
        if self._sealed is None:
            return
        if self._sealed.keys != list(batch.keys):
            rows = read_columns(batch, "responses", "response_mask")
            self._sealed = self._sealed.moved_to(batch.keys, rows["responses"], rows["response_mask"])
        self._sealed.add(columns)

    def _seal_stored(self, batch: Any, name: str) -> None:
        """Store the checksum of a column as TransferQueue contains it now."""
        self.seal(batch, read_columns(batch, name))

    def _compute_log_probs(self, batch: Any, rows: Sequence[Pair]) -> list[list[float]]:
        """Compute log-probs of each row's response at temperature 1, in temporary rows outside the batch."""
        demand_text(read_columns(batch, MEDIA)[MEDIA])
        told, flags = batch.extra_info or {}, self.add_ons.batch_flags()
        padded = pad_rows(rows, len(batch.keys), self._count_ranks(), self.config)
        uid, source = uuid4().hex, read_columns(_first(batch), *OF_A_FORWARD)
        keys = [f"forward{uid}_{number}_0" for number in range(len(padded))]
        alongside = type(batch)(
            keys=keys,
            tags=[dict(batch.tags[0]) for _ in keys],
            partition_id=OWN_PARTITION,
            extra_info={name: value for name, value in told.items() if name not in flags} | FORWARD,
        )
        try:
            fields = build_nested(padded, source)
            tq.kv_batch_put(keys=keys, partition_id=OWN_PARTITION, fields=fields, tags=alongside.tags)
            self.workers.compute_log_prob(alongside)
            found = read_columns(alongside, "log_probs", "response_mask")
        finally:
            tq.kv_clear(keys=keys, partition_id=OWN_PARTITION)
        responses = response_from_nested(found["log_probs"], found["response_mask"]).unbind()
        return [each.float().tolist() for each in responses[: len(rows)]]

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._flag(batch)
        return self.add_ons.wrap("old_log_prob", partial(self._score, metrics=metrics), metrics)(batch)

    def _flag(self, batch: Any) -> None:
        """Set the add-ons' flags in a batch's metadata; needed after each put, which returns metadata without flags."""
        if flags := self.add_ons.batch_flags():
            batch.extra_info.update(flags)

    def _score(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.supervision.wants_sampled:
            # The trainer reads these rows for the first time here, before other code can change them.
            versions = (EXTRA_FIELDS,) if self.correction.reads_token_versions else ()
            with name_missing_column():
                rows = read_columns(batch, *SAMPLED, *INPUT_COLUMNS, *versions)
            self.supervision.sampled(rows)
            self._sealed = SealedRows(batch.keys, rows["responses"], rows["response_mask"])
            by_token = find_token_versions(self.correction, rows)
            seen = {ROLLOUT_LOG_PROBS: rows[ROLLOUT_LOG_PROBS], INPUT: hash_model_input(rows)}
            self.seal(batch, seen | by_token)
        if self.add_ons.uses("on_rollout"):
            view = self.view(batch)
            self.add_ons.on_rollout(view)
            batch = view.batch
        if self.supervision.takes_mu:
            # The loss computes its own pi_old; until then, the column contains mu.
            return self._put_mu(batch)
        self._flag(batch)
        with self.cost.of_pi_old():
            batch = self.verls._compute_old_log_prob(batch, metrics)
        if self.supervision.wants_sampled:
            scored = key_of("old_log_probs")
            rows = read_columns(batch, *ALIGNED, scored, "uid")
            self._sealed_by_workers = ("old_log_probs",) if scored in rows.keys() else ()
            if not self._sealed_by_workers:
                self.seal(batch, {"old_log_probs": rows["old_log_probs"]})
            uids, rows = [str(uid) for uid in rows["uid"]], rows.select(*ALIGNED)
            if self._sealed is not None and self._sealed.keys == list(batch.keys):
                rows["responses"] = self._sealed.tokens
            self.supervision.aligned(rows, uids)
            if self.supervision.scored(rows, uids, self.global_steps):
                batch = self._put_mu(batch)
        return batch

    def _put_mu(self, batch: Any) -> Any:
        mu = read_columns(batch, ROLLOUT_LOG_PROBS)[ROLLOUT_LOG_PROBS]
        self._sealed_by_workers = ()
        self.seal(batch, {"old_log_probs": mu})
        return put_columns(batch, old_log_probs=mu)

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = self.verls._compute_ref_log_prob(batch, metrics)
        if self._sealed is not None and self.config.actor_rollout_ref.actor.get("use_kl_loss"):
            scored = key_of("ref_log_prob")
            if scored in read_columns(batch, scored).keys():
                self._sealed_by_workers += ("ref_log_prob",)
            else:
                self._seal_stored(batch, "ref_log_prob")
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        view = self.view(batch)
        self._check_rewards(view)
        estimate = self.verls._compute_advantage

        def estimator() -> None:
            view.batch = estimate(view.batch, metrics)
            self._check_kl_in_reward(view)  # verl subtracts the KL before this

        metrics.update(self._estimate_advantages(view, estimator))
        if self._sealed is not None:
            self._seal_stored(view.batch, "advantages")
        return view.batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._flag(batch)
        return self.add_ons.wrap("update_actor", partial(self._update, metrics=metrics), metrics)(batch)

    def _update(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.supervision.begin()
        batch = self.verls._update_actor(self._with_plan(batch), metrics)
        metrics.update(self.supervision.metrics() | self.add_ons.metrics())
        return batch

    def _with_plan(self, batch: Any) -> Any:
        """Add the plan to the batch."""
        plan, columns = self._plan_update(batch, len(batch.keys))
        if self._sealed is not None:
            by_token = TOKEN_VERSIONS_SEALED in self._sealed.names
            self.seal(batch, columns_to_seal(columns) | ({} if by_token else _versions_of(batch)))
            plan = replace(plan, sealed=(*self._sealed.names, *self._sealed_by_workers, PLAN_HASH))
            columns |= self._sealed.columns()
            columns[key_of(PLAN_HASH)] = seal_constant(plan.fingerprint(), len(batch.keys))
        if columns:
            batch = put_columns(batch, **columns)
        self._flag(batch)
        batch.extra_info[PLAN] = plan
        self.supervision.expect(plan)
        self.cost.add(columns, plan)
        return batch

    def _count_updates(self) -> int:
        updates: int = self.trainer.parameter_sync_step
        return updates

    def _count_ranks(self) -> int:
        ranks: list[int] = self.workers._dispatch_info["actor"]  # set by verl's trainer when it balanced the batch
        return max(ranks) + 1

    def take_out(self, batch: Any, why: str, *, masked: Collection[str], silenced: Collection[str]) -> Any:
        view = self.view(batch)
        self.add_ons.take_out(view, why, masked=masked, silenced=silenced)
        return view.batch

    def _update_and_collect(self, update: Any, batch: Any) -> Any:
        """Call the workers' ``update_actor``; take this package's reports out of its metrics, and check them."""
        output = update(batch)
        self._judge_update(output["metrics"], batch)
        return output


def _versions_of(batch: Any) -> dict[str, Tensor]:
    spans = [[tag.get(end) for end in (OLDEST_VERSION, NEWEST_VERSION)] for tag in batch.tags]
    return {} if any(None in span for span in spans) else {VERSIONS_SEALED: torch.tensor(spans).reshape(-1, 2)}


def _first(batch: Any) -> Any:
    """Return a batch's metadata with only the first row."""
    return replace(batch, keys=batch.keys[:1], tags=batch.tags[:1])
