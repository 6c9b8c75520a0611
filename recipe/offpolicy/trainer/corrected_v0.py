"""A run with verl's V0 trainer (``RayPPOTrainer`` of verl 0.7.1 to 0.9.1), on engines or legacy actors.

Patched functions: ``METHODS``, the module's ``compute_advantage``, which ``fit`` calls, and ``update_actor``,
``compute_log_prob`` and ``set_loss_fn`` of the actor's worker group. A trainer with its own ``fit`` may call the worker
group directly instead of these methods. The group's batches are TensorDicts for engine workers and DataProtos for
legacy actors. Engine workers receive the loss through ``set_loss_fn``; legacy actors read it from a ``Handover`` in
``meta_info``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl_patches.execution_path import live_path
from verl_patches.legacy.handover import HANDOVER
from verl_patches.rollout_seams import note_clients
from verl_patches.trainer_seams import around_advantage

from ..batch.micro_batch import ROLLOUT_LOG_PROBS
from ..batch.plan import (
    COLUMNS,
    PLAN,
    REWARD,
    UID,
    SharedPlan,
    columns_to_seal,
    seal_batch,
)
from ..batch.seals import INPUT, PREFIX, build_seals, hash_model_input, key_of
from ..batch.weight_versions import (
    CHUNK_SEALS,
    CHUNKS,
    EXTRA_FIELDS,
    NEWEST_VERSION,
    OLDEST_VERSION,
    TOKEN_VERSIONS_SEALED,
    VERSION,
    VERSIONS,
    VERSIONS_SEALED,
    find_token_versions,
)
from ..extensions.add_on import AddOn
from ..proof.rollout_log_probs import ALIGNED, SAMPLED
from ..proof.verify import LivenessError
from ..recording.run import AFTER_FAILURE
from ..worker.legacy_loss import Handover
from ..worker.verl_workers import adopt
from .batch_view import MEDIA, DataProtoBatch, DataProtoPrompts, Pair, build_padded, demand_text, pad_rows
from .corrected_run import CorrectedRun

_TOKENS = ("responses", "response_mask")
_READ = (ROLLOUT_LOG_PROBS, "old_log_probs", "advantages")
"""Columns that every corrected loss reads."""
_OF_REFERENCE = ("ref_log_prob",)
NOT_COMPARED = {"training/rollout_probs_diff_valid": 0.0} | {
    f"training/{name}": math.nan
    for name in (
        "rollout_probs_diff_max",
        "rollout_probs_diff_mean",
        "rollout_probs_diff_std",
        "rollout_actor_probs_pearson_corr",
    )
}
"""Values of verl's metrics that compare mu with pi_old, for steps in which they cannot be compared."""


class CorrectedV0(CorrectedRun):
    """One run with ``RayPPOTrainer`` or a subclass."""

    METHODS: ClassVar[tuple[str, ...]] = (
        *CorrectedRun.METHODS,
        "init_workers",
        "_init_models",
        "fit_step",
        "_get_gen_batch",
        "_compute_old_log_prob",
        "_compute_ref_log_prob",
        "_update_actor",
    )

    def __init__(self, trainer: Any, choose: Callable[[Any], Iterable[AddOn]] = lambda run: ()) -> None:
        super().__init__(trainer, choose)
        self._advantage_metrics: dict[str, float] = {}
        self._sampled_at: int | None = None  # step of the rollout that was checked but not yet used for training
        self._scored_seal: Tensor | None = None  # checksum of the pi_old that the workers computed last
        self._scored = False  # _compute_old_log_prob has compared this rollout with pi_old
        self._gathered: dict[str, float] | None = None  # metrics of an update inside _update_actor

    def init_workers(self) -> Any:
        self._begin()
        if self.add_ons.uses("rollout_client"):
            note_clients(lambda client: self.add_ons.replace("rollout_client", client))
        self._choose_actor_class()
        with self._phase("start"):
            made = self.verls.init_workers()
        if not inspect.isawaitable(made) and "supervision" not in vars(self):
            self._adopt_workers()
        return made

    def _init_models(self) -> None:
        """Initialise the models of a trainer that samples in another process; Ray calls ``init_workers`` of its class,
        not of the instance."""
        self.verls._init_models()
        if hasattr(self.trainer, "actor_rollout_wg"):  # a fork's method with this name may create other models
            self._adopt_workers()

    def _adopt_workers(self) -> None:
        self._begin()
        self._begin_supervision()
        self._by_engine = live_path(self.config).worker == "engine"
        forward = self.cost.counted(self.workers.compute_log_prob)
        self.workers.compute_log_prob = self._looking(forward)
        self._hand_over_loss()
        adopt(self.workers, self._update_and_collect)
        around_advantage(self._around_advantage)
        # For this trainer, Ray calls ``load_checkpoint`` of the class, not of the instance.
        if self._samples_elsewhere and (resumed := self._check_resumed()) is not None:
            self._restore_active(resumed)
            self._hand_over_loss()
            self._restore_add_ons()

    def _load_checkpoint(self) -> Any:
        loaded = super()._load_checkpoint()
        if self._resumed is not None:
            self._restore_active(self._resumed)
            self._hand_over_loss()
        return loaded

    @property
    def _samples_elsewhere(self) -> bool:
        """True for verl's fully asynchronous trainer, which counts versions of the weights itself."""
        return hasattr(self.trainer, "current_param_version")

    @property
    def _step(self) -> int:
        return self.trainer.current_param_version + 1 if self._samples_elsewhere else self.global_steps

    def _count_updates(self) -> int:
        return self.trainer.trigger_parameter_sync_step if self._samples_elsewhere else 1

    @property
    def checkpoint_step(self) -> int:
        return self.trainer.current_param_version if self._samples_elsewhere else self.global_steps

    def fit_step(self, *args: Any, **kwargs: Any) -> Any:
        made = self.verls.fit_step(*args, **kwargs)
        return self._await_step(made) if self._samples_elsewhere else made

    async def _await_step(self, made: Any) -> Any:
        """End the run if a step raises; a fully asynchronous trainer also raises at its end."""
        try:
            return await made
        except BaseException:
            self._finish_recording(AFTER_FAILURE)
            self._close("an extension", self.add_ons.end)
            raise

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        # Validation calls the same method.
        if self.add_ons.uses("next_batch") and not self._validating:
            self.add_ons.next_batch(DataProtoPrompts(batch, self.global_steps))
        return self.verls._get_gen_batch(batch)

    def _view(self, batch: DataProto) -> DataProtoBatch:
        def note(columns: Mapping[str, Tensor]) -> None:
            self.cost.add_columns(columns)
            self._seal(batch.batch, columns)

        return DataProtoBatch(batch, self._step, note, self._compute_log_probs, self._decide)

    def _read_rows(self, batch: Any) -> TensorDict:
        """Read the columns of a plan; add each row's versions and chunks to the batch, where the loss reads them."""
        tensors = _tensors(batch)
        tensors[VERSIONS] = versions = self._read_versions(batch)
        if (fields := _list_fields(batch, versions)) is not None:
            if isinstance(batch, DataProto):
                batch.non_tensor_batch[EXTRA_FIELDS] = np.array(fields, dtype=object)
            else:
                batch[EXTRA_FIELDS] = NonTensorStack(*fields)
        rows = tensors.select(*COLUMNS, VERSIONS, strict=False)
        if isinstance(batch, DataProto) and EXTRA_FIELDS in batch.non_tensor_batch:
            rows[EXTRA_FIELDS] = NonTensorStack(*batch.non_tensor_batch[EXTRA_FIELDS])
        return rows

    def _seal(self, tensors: TensorDict, columns: Mapping[str, Tensor], into: TensorDict | None = None) -> None:
        """Store checksums of the columns in ``tensors``, so that the loss stops the run if it later reads other values.

        Args:
            into: receives the checksums instead of ``tensors``.
        """
        if self.supervision.wants_sampled and set(_TOKENS) <= set(tensors.keys()):
            seals = build_seals(tensors["responses"], tensors["response_mask"], columns)
            for name, seal in seals.items():
                (tensors if into is None else into)[key_of(name)] = seal

    def _compute_log_probs(self, batch: DataProto, rows: Sequence[Pair]) -> list[list[float]]:
        """Compute log-probs of each row's response at temperature 1."""
        demand_text(batch.non_tensor_batch.get(MEDIA, ()))
        axes = batch.batch["position_ids"].shape[1:-1]
        columns = build_padded(pad_rows(rows, len(batch), self._count_ranks(), self.config), axes)
        tokens = columns["attention_mask"].sum(-1).tolist()
        alongside = DataProto.from_dict(columns)
        flags = self.add_ons.batch_flags()
        told = {name: value for name, value in batch.meta_info.items() if name not in flags}
        alongside.meta_info = told | {"temperature": 1.0, "global_token_num": tokens}
        old, _ = self.verls._compute_old_log_prob(alongside)
        found = old.batch["old_log_probs"].float()
        return [found[row, : len(response)].tolist() for row, (_, response) in enumerate(rows)]

    def _look(self, batch: Any) -> None:
        """Check a rollout as soon as the trainer receives its log-probs."""
        if self.supervision.wants_sampled:
            rows = _tensors(batch)
            self.supervision.sampled(rows)
            seen = {ROLLOUT_LOG_PROBS: rows[ROLLOUT_LOG_PROBS], INPUT: hash_model_input(rows)}
            self._seal(rows, seen | self._find_token_versions(batch))
        self._sampled_at, self._scored, self._scored_seal = self.global_steps, False, None

    def _looking(self, compute_log_prob: Any) -> Any:
        """Make the worker group's ``compute_log_prob`` check a rollout that is passed to it directly."""

        def looking(batch: Any, *args: Any, **kwargs: Any) -> Any:
            rows = _tensors(batch)
            if self._sampled_at != self.global_steps and set(SAMPLED) <= set(rows.keys()):
                self._look(batch)
            output = compute_log_prob(batch, *args, **kwargs)
            sealed = isinstance(output, TensorDict) and key_of("old_log_probs") in output.keys()
            self._scored_seal = output[key_of("old_log_probs")] if sealed else None
            return output

        return looking

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        self.cost.begin()
        batch.meta_info.update(self.add_ons.batch_flags())
        self._look(batch)
        self._scored = True
        if self.add_ons.uses("on_rollout"):
            self.add_ons.on_rollout(self._view(batch))
        if self.supervision.takes_mu:
            # The loss computes its own pi_old; until then, the column contains mu. verl logs the mean entropy of a
            # forward pass that does not run here.
            mu = batch.batch[ROLLOUT_LOG_PROBS]
            unknown = torch.full_like(mu, torch.nan, dtype=torch.float32)
            made = DataProto.from_dict({"old_log_probs": mu, "entropys": unknown})
            self._seal(batch.batch, {"old_log_probs": mu}, made.batch)
            return made, 0.0
        with self.cost.of_pi_old():
            old, mfu = self.verls._compute_old_log_prob(batch)
        self._seal(batch.batch, {"old_log_probs": old.batch["old_log_probs"]}, old.batch)
        if self.supervision.wants_sampled:
            if self._scored_seal is not None:
                # The worker that computed the log-probs also computed their checksum, before other code could change
                # them.
                old.batch[key_of("old_log_probs")] = self._scored_seal
            rows = batch.batch.select("response_mask", "responses", ROLLOUT_LOG_PROBS)
            rows["old_log_probs"] = old.batch["old_log_probs"]
            uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
            self.supervision.aligned(rows, uids)
            if self.supervision.scored(rows, uids, self._step):
                old.batch["old_log_probs"] = batch.batch[ROLLOUT_LOG_PROBS]
                self._seal(batch.batch, {"old_log_probs": batch.batch[ROLLOUT_LOG_PROBS]}, old.batch)
        return old, mfu

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        found: DataProto = self.verls._compute_ref_log_prob(batch)
        self._seal(batch.batch, {name: found.batch[name] for name in _OF_REFERENCE}, found.batch)
        return found

    def _around_advantage(self, compute: Any, data: DataProto, *args: Any, **kwargs: Any) -> DataProto:
        if self._sampled_at != self.global_steps:
            self._look(data)
        self._let_mu_stand_in(data.batch)
        view = self._view(data)
        self._check_rewards(view)
        self._check_kl_in_reward(view)

        def estimator() -> None:
            view.batch = compute(view.batch, *args, **kwargs)

        self._advantage_metrics = self._estimate_advantages(view, estimator)
        tensors = view.batch.batch
        self._seal(tensors, {"advantages": tensors["advantages"]})
        return view.batch

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.supervision.begin()
        self._gathered = {}
        try:
            batch.meta_info.update(self.add_ons.batch_flags())
            output: DataProto = self.verls._update_actor(batch)
            self.supervision.metrics()
            output.meta_info["metrics"].update(self._gathered)
        finally:
            self._gathered = None
        if self.supervision.takes_mu:
            # verl has just compared mu with a copy of mu in old_log_probs, so its metrics would show no difference.
            output.meta_info["metrics"].update(NOT_COMPARED)
        return output

    def _let_mu_stand_in(self, tensors: TensorDict) -> None:
        """Replace pi_old with mu if the correction does not use the computed pi_old."""
        if self.supervision.takes_mu and not self._scored:
            tensors["old_log_probs"] = tensors[ROLLOUT_LOG_PROBS]
            self._seal(tensors, {"old_log_probs": tensors[ROLLOUT_LOG_PROBS]})

    def _score(self, batch: Any) -> None:
        """Run the checks of ``_compute_old_log_prob`` on a batch that was passed to the worker group directly."""
        tensors = _tensors(batch)
        self._let_mu_stand_in(tensors)
        if self.supervision.wants_sampled and not self.supervision.takes_mu:
            uids = _objects(batch, "uid")
            self.supervision.aligned(tensors.select("responses", *ALIGNED), uids and [str(uid) for uid in uids])
        self._scored = True

    def _with_plan(self, batch: Any) -> Any:
        """Add the plan to a batch for the worker group, together with the loss if the actor is a legacy actor."""
        self._read_rows(batch)  # the loss needs the columns that this call adds, even if the plan does not need them
        tensors = _tensors(batch)
        versions = tensors[VERSIONS]
        plan, columns = self._plan_update(batch, len(batch))
        if plan.update is not None and not self._by_engine:
            columns |= build_row_identity(batch)
        for name, column in columns.items():
            tensors[name] = column
        unsealed = key_of(TOKEN_VERSIONS_SEALED) not in tensors.keys()
        of_rows = (self._find_token_versions(batch) or {VERSIONS_SEALED: versions}) if unsealed else {}
        if self.supervision.wants_sampled:
            read = (*_READ, *(_OF_REFERENCE if self.config.actor_rollout_ref.actor.get("use_kl_loss") else ()))
            of_loss = {name: tensors[name] for name in read if name in tensors.keys()}
            plan = seal_batch(plan, tensors, {**of_loss, **columns_to_seal(columns), **of_rows})
        self.supervision.expect(plan)
        handed: SharedPlan | Handover = plan
        if not self._by_engine:
            handed = Handover(
                self.correction,
                plan,
                shadows=self.shadows,
                record=self.recording.settings,
                moving=self.supervision.active_correction.moving,
                extensions=self.add_ons.worker_halves(),
            )
        if isinstance(batch, DataProto):
            batch.meta_info[PLAN if self._by_engine else HANDOVER] = handed
        else:
            tu.assign_non_tensor(batch, **{PLAN: handed})
        seals = {name: column for name, column in tensors.items() if name.startswith(PREFIX)}
        self.cost.add({VERSIONS: versions, **columns, **seals}, handed)
        return batch

    def _find_token_versions(self, batch: Any) -> dict[str, Tensor]:
        if not self.correction.reads_token_versions:
            return {}
        versions = self._read_versions(batch)
        rows = TensorDict({VERSIONS: versions, "response_mask": _tensors(batch)["response_mask"]}, len(versions))
        if (fields := _list_fields(batch, versions)) is not None:
            rows[EXTRA_FIELDS] = NonTensorStack(*fields)
        return find_token_versions(self.correction, rows)

    def _read_versions(self, batch: Any) -> Tensor:
        versions = _versions(batch, self._step)
        # one_step_off_policy sends weights before an update, under the step number of that update.
        return (versions - 1).clamp(min=0) if hasattr(self.trainer, "_async_gen_next_batch") else versions

    def _count_ranks(self) -> int:
        ranks: int = self.trainer._get_dp_size(self.workers, "actor")
        return ranks

    def _hand_over_loss(self) -> None:
        if self._by_engine:
            super()._hand_over_loss()

    def _update_and_collect(self, update: Any, batch: Any) -> Any:
        """Call the workers' ``update_actor`` with the plan, and check this package's reports in the returned metrics.

        If the caller did not go through ``_update_actor``, this package's metrics are added to the workers' metrics.
        """
        if self.correction.baseline == "exclude" and not self._advantage_metrics:
            raise LivenessError("correction.baseline=exclude: verl bypassed the hook that removes rejected sequences.")
        if self.correction.proximal == "same_engine" and not self._scored:
            raise LivenessError("correction.proximal=same_engine: verl bypassed the hook that compares mu with pi_old.")
        if not self._scored:
            self._score(batch)
        output = update(self._with_plan(batch))
        metrics = output.meta_info["metrics"] if isinstance(output, DataProto) else output["metrics"]
        self._judge_update(metrics, batch)
        ours = self.supervision.metrics() | self._advantage_metrics | self.cost.metrics() | self.add_ons.metrics()
        (metrics if self._gathered is None else self._gathered).update(ours)
        self._advantage_metrics, self._sampled_at, self._scored = {}, None, False
        self.cost.begin()
        return output


def build_row_identity(batch: DataProto) -> dict[str, Tensor]:
    """Build tensor columns with each row's uid and reward, for workers that receive only tensors."""
    uids = [str(uid).encode() for uid in batch.non_tensor_batch["uid"]]
    width = max(map(len, uids))
    padded = torch.frombuffer(bytearray(b"".join(uid.ljust(width, b"\0") for uid in uids)), dtype=torch.uint8)
    return {UID: padded.reshape(len(uids), width), REWARD: batch.batch["token_level_scores"].sum(-1)}


def _tensors(batch: Any) -> TensorDict:
    tensors: TensorDict = batch.batch if isinstance(batch, DataProto) else batch
    return tensors


def _objects(batch: Any, name: str) -> list[Any] | None:
    """Return a non-tensor column's value for each row, from a batch of either kind; None if the column is missing."""
    column = batch.non_tensor_batch.get(name) if isinstance(batch, DataProto) else batch.get(name, None)
    # The trainer's step, a single value for the batch, has the same name as the column of versions.
    if column is None or (name == VERSION and isinstance(column, NonTensorData)):
        return None
    return list(column) if isinstance(batch, DataProto) else column.tolist()


def _list_fields(batch: Any, versions: Tensor) -> list[dict[str, Any]] | None:
    """List each row's versions and chunks as verl's V1 trainer does; None if no client has recorded chunks."""
    if (chunks := _objects(batch, CHUNKS)) is None:
        return None
    spans = [dict(zip((OLDEST_VERSION, NEWEST_VERSION), span, strict=True)) for span in versions.tolist()]
    seals = _objects(batch, CHUNK_SEALS) or [None] * len(chunks)
    return [{**span, CHUNKS: turns, CHUNK_SEALS: seal} for span, turns, seal in zip(spans, chunks, seals, strict=True)]


def _versions(batch: Any, step: int) -> Tensor:
    """Stack the versions of the weights that sampled each row's first and last token, (B, 2) int64.

    If verl does not record versions, the trainer is synchronous: it sends the weights to the rollout engine between an
    update and the next rollout. All rows were therefore sampled by the weights after the previous step.
    """
    # verl 0.8.0 records only one version for a request that is never resumed.
    for ends in ((OLDEST_VERSION, NEWEST_VERSION), (VERSION, VERSION)):
        spans = [_objects(batch, end) or [None] for end in ends]
        if not any(version is None for span in spans for version in span):
            return torch.tensor([[int(version) for version in span] for span in spans]).T.contiguous()
    return torch.full((len(batch), 2), step - 1, dtype=torch.int64)
