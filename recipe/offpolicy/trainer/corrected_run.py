"""A corrected run, whose methods replace methods of verl's trainer and call the original methods.

The methods are set on the trainer's instance, so subclasses of verl's trainers need no changes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor

from verl.trainer.ppo.utils import Role
from verl_patches.trainer_seams import plain_advantage

from ..batch.plan import BatchSplit, SharedPlan, build_plan, decide_rollout, regroup_without_rejected
from ..correction import CorrectionSpec, RolloutStage
from ..delivery.checksums import DeliverySettings
from ..extensions.add_on import AddOn
from ..extensions.add_ons import AddOns
from ..fault_tolerance.checkpoints import ACTIVE, check_before_loading, extension_states, find_record, guard_save
from ..fault_tolerance.state_schema import restoring
from ..fault_tolerance.watchdog import Watchdog, watch
from ..monitor.active_correction import find_differences, list_dependents
from ..monitor.step_cost import StepCost
from ..preflight.checks.path import demand_seams
from ..preflight.composed import OUTCOME, Composed, check_one_mini_batch
from ..proof.rewards import BY_KL, DenseRewardGuard, check_rewards
from ..recording.run import AFTER_FAILURE, PATIENCE, RunRecord
from ..replay.batch_routes import ReplaySettings, read_megatron_mode
from ..staleness.staleness_settings import StalenessSettings
from ..staleness.weight_snapshots import SnapshotSettings, WeightSnapshots
from ..support.support_settings import SupportSettings
from ..worker.loss import build_loss
from .supervision import Supervision

if TYPE_CHECKING:
    from .batch_view import (
        DataProtoBatch,
        TransferQueueBatch,  # verl 0.7.1 lacks its dependencies
    )

logger = logging.getLogger("verl.offpolicy")

ACTORS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
"""Roles with a worker that trains."""


class CorrectedRun:
    """Base class of runs with verl's V0 and V1 trainers.

    Patched functions, which are the same from verl 0.7.1 to 0.9.1: ``METHODS`` and those in ``watchdog.PHASES``.

    Args:
        trainer: verl's trainer, before its constructor has run.
        choose: returns the add-ons of the run that are not extensions, outermost first.

    Attributes:
        verls: the trainer's own methods, bound, by name.
    """

    METHODS: ClassVar[tuple[str, ...]] = (
        "fit",
        "_validate",
        "_val_metrics_update",
        "_save_checkpoint",
        "_load_checkpoint",
    )
    """Methods of verl's trainer that this object's methods of the same names replace; a trainer may lack some of
    them."""

    _count_ranks: Callable[[], int]  # data-parallel ranks of the actor
    _count_updates: Callable[[], int]  # updates of a step
    _read_rows: Callable[[Any], TensorDict]  # columns of a batch's plan
    supervision: Supervision
    recording: RunRecord
    shadows: Mapping[str, CorrectionSpec]

    def __init__(self, trainer: Any, choose: Callable[[Any], Iterable[AddOn]] = lambda run: ()) -> None:
        self.trainer, self._choose = trainer, choose
        self._validating = self._begun = False
        self._watchdog: Watchdog | None = None
        self._resumed: Mapping[str, Any] | None = None  # state of alarms and bounds from a checkpoint
        self.verls = SimpleNamespace()
        for name in self.METHODS:
            if hasattr(trainer, name):
                setattr(self.verls, name, getattr(trainer, name))
                setattr(trainer, name, getattr(self, name))

    @property
    def config(self) -> DictConfig:
        """The configuration of the run."""
        config: DictConfig = self.trainer.config
        return config

    @property
    def global_steps(self) -> int:
        """verl's step number."""
        step: int = self.trainer.global_steps
        return step

    @property
    def _step(self) -> int:
        """The step from which ages are counted: the version of the rollout engine's weights plus 1."""
        return self.global_steps

    @property
    def workers(self) -> Any:
        """The worker group of the actor."""
        return self.trainer.actor_rollout_wg

    @property
    def correction(self) -> CorrectionSpec:
        """The active correction."""
        return self.supervision.spec

    @cached_property
    def cost(self) -> StepCost:
        """Measured cost of the current step."""
        return StepCost()

    @cached_property
    def add_ons(self) -> AddOns:
        """All add-ons of the run."""
        return AddOns.from_config(self.config, tuple(self._choose(self)))

    def _begin(self) -> None:
        """Start the monitoring and the add-ons once; verl's constructor has already set the configuration."""
        if self._begun:
            return
        self._begun = True
        demand_seams(self.config)
        self._watchdog = watch(self.trainer, self.config)
        self.add_ons.begin(self.config, self._phase)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watchdog is None else self._watchdog.phase(name)

    def _choose_actor_class(self) -> None:
        """Let add-ons replace the class of the actor's workers that verl's trainer has chosen."""
        mapping = self.trainer.role_worker_mapping
        if self.add_ons.uses("actor_class"):
            for role in (role for role in ACTORS if role in mapping):
                mapping[role] = ray.remote(self.add_ons.replace("actor_class", mapping[role].__ray_actor_class__))

    def _begin_supervision(self) -> None:
        """Start the proof and the recording once workers exist, and install the add-ons in the workers' engines."""
        composed = Composed(self.config)
        self.shadows, spec = composed.shadows, composed.spec
        self.supervision = Supervision(spec, self.config, self.add_ons)
        self.recording = RunRecord(self.config, spec, self.shadows, self.add_ons.describe())
        if parts := self.add_ons.engine_parts():
            self.workers.install_offpolicy(parts)

    def _hand_over_loss(self) -> None:
        """Send the loss for the next updates to the engine's workers."""
        loss = build_loss(
            self.config,
            self.correction,
            self.shadows,
            moving=self.supervision.active_correction.moving,
            extensions=self.add_ons.worker_halves(),
        )
        self.workers.set_loss_fn(loss)

    def split_batch(self) -> BatchSplit:
        """Describe how the workers split a batch."""
        return BatchSplit.of(self.config, self._count_ranks())

    def _decide(self, batch: Any) -> RolloutStage:
        return decide_rollout(self.correction, self._read_rows(batch), self._step)

    def _plan_update(self, batch: Any, count: int) -> tuple[SharedPlan, dict[str, Tensor]]:
        """Build the plan of one update with ``count`` rows; return the plan and the columns to send with it."""
        self.add_ons.before_update()
        check_one_mini_batch(self.correction, self.config, count)
        plan, columns = build_plan(
            self.correction,
            self.shadows,
            step=self._step,
            rows=partial(self._read_rows, batch),
            batch_split=self.split_batch,
            bounds=self.supervision.active_correction.bounds,
        )
        plan, marks = self.supervision.mark_proof(
            plan, lambda: self._read_rows(batch)["response_mask"], self._count_ranks
        )
        updates = self._count_updates()
        plan = self.recording.announce_update(plan, rows=count, batch_split=self.split_batch, updates=updates)
        return plan, columns | marks

    def _estimate_advantages(
        self, view: DataProtoBatch | TransferQueueBatch, estimate: Callable[[], None]
    ) -> dict[str, float]:
        """Run verl's estimator and the add-ons, leaving out rejected rows if ``baseline=exclude``; return metrics."""
        if self.correction.baseline == "include":
            self.add_ons.compute_advantages(view, estimate)
            return {}
        groups = regroup_without_rejected(self.correction, self._read_rows(view.batch), view.list_uids(), view.step)
        view.regroup(groups.uids, groups.silent)

        def estimate_without_rejected() -> None:
            with view.without_rejected(groups):
                estimate()

        self.add_ons.compute_advantages(view, estimate_without_rejected)
        return groups.metrics

    def _judge_update(self, metrics: dict[str, Any], batch: Any) -> None:
        """Take this package's reports out of the workers' metrics of one update, and check them."""
        self.add_ons.on_update(metrics, batch)
        if self.supervision.collect(metrics):
            self._hand_over_loss()
        if self.supervision.proof is not None:
            self.recording.write_proof(self._step, *self.supervision.proof)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        with self._finishing() as finishing:
            result = self.verls.fit(*args, **kwargs)
            if inspect.isawaitable(result):
                finishing.pop_all()
                return self._await_fit(result)
            return result

    async def _await_fit(self, result: Any) -> Any:
        with self._finishing():
            return await result

    @contextmanager
    def _finishing(self) -> Iterator[ExitStack]:
        """Finish the recording and the extensions when the context exits."""
        with ExitStack() as stack:
            stack.callback(self._close, "an extension", self.add_ons.end)
            # After a failure, workers are killed, and the update that caused it may not have been written yet.
            failed = stack.enter_context(ExitStack())
            failed.callback(self._finish_recording, AFTER_FAILURE)
            yield stack
            failed.pop_all()
            stack.callback(self._finish_recording, PATIENCE)

    def _finish_recording(self, patience: float) -> None:
        if "recording" in vars(self):  # a run may end before it has workers
            self._close("the recording", partial(self.recording.finish, patience))

    def _close(self, what: str, end: Callable[[], None]) -> None:
        try:
            end()
        except Exception:  # an error here must not replace the error that ended the run
            logger.warning("%s failed to close.", what, exc_info=True)

    @cached_property
    def _dense_rewards(self) -> DenseRewardGuard:
        return DenseRewardGuard(self.config, plain_advantage(), OUTCOME)

    def _check_rewards(self, batch: Any) -> None:
        """Stop the run if its rewards are not finite, or if the estimator sums its per-token rewards."""
        check_rewards(batch.scores, batch.uids, f"step {batch.step}")
        self._dense_rewards.check(batch)

    def _check_kl_in_reward(self, batch: Any) -> None:
        """Stop the run if the KL in its rewards is not finite; reads the rewards after the KL was subtracted."""
        if OmegaConf.select(self.config, "algorithm.use_kl_in_reward"):
            rewards = batch.rows("token_level_rewards")["token_level_rewards"]
            check_rewards(rewards, batch.uids, f"step {batch.step}", BY_KL)

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        self._validating = True
        try:
            return self.add_ons.validate(self.trainer, partial(self.verls._validate, *args, **kwargs))
        finally:
            self._validating = False

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rewards = torch.tensor(list(reward_extra_infos_dict.get("reward", ())), dtype=torch.float64)
        check_rewards(rewards, sample_uids, "validation")
        found = self.verls._val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, *args, **kwargs)
        return found | self.add_ons.validation_metrics(data_sources, sample_uids, reward_extra_infos_dict)

    @property
    def checkpoint_step(self) -> int:
        """Number in the name of the checkpoint folder."""
        return self.global_steps

    def _check_resumed(self) -> dict[str, Any] | None:
        spec, of_config = Composed(self.config).spec, partial(find_differences, self.config)
        dependents = [*list_dependents(self.config), *self.add_ons.list_dependents()]
        return check_before_loading(self.config, spec, of_config, self.add_ons.differences, dependents)

    def _restore_active(self, resumed: Mapping[str, Any]) -> None:
        with restoring(lambda: find_record(self.config), ACTIVE):
            self.supervision.active_correction.restore(resumed)

    def _save_checkpoint(self) -> None:
        active = self.supervision.active_correction.state()
        spec, limit = Composed(self.config).spec, self.add_ons.rate_limit_state
        with guard_save(self.config, self.checkpoint_step, spec, active, self.add_ons.state, limit):
            self.verls._save_checkpoint()

    def _load_checkpoint(self) -> Any:
        self._resumed = self._check_resumed()
        if self.add_ons.uses("load_prompts"):
            # By now, every trainer has created the data loader without reading from it; the checkpoint restores its
            # state.
            self.trainer.train_dataloader = self.add_ons.load_prompts(self.trainer.train_dataloader)
        loaded = self.verls._load_checkpoint()
        self._restore_add_ons()
        return loaded

    def _restore_add_ons(self) -> None:
        if self.add_ons.uses("restore"):
            self.add_ons.restore(*extension_states(self.config))
        self.add_ons.on_resumed()


# These modules are imported only when needed, because other releases may lack their dependencies.


def choose_v0(run: CorrectedRun) -> Iterator[AddOn]:
    """Choose the add-ons of a run that uses the V0 trainer."""
    config = run.config
    if (support := SupportSettings.from_config(config)) is not None:
        from ..support.support_replay import SupportReplay

        yield SupportReplay(support)
    elif (centering := SupportSettings.for_centering(config)) is not None:
        from ..centering.score_centering import ScoreCentering

        yield ScoreCentering(centering)
    settings = DeliverySettings.from_config(config)
    if settings.sums is not None or settings.probe is not None:
        from ..delivery.weight_delivery import WeightDelivery

        yield WeightDelivery(run, settings)


def choose_v1(run: Any) -> Iterator[AddOn]:
    """Choose the add-ons of a run that uses a V1 trainer."""
    config = run.config
    yield from choose_v0(run)
    if (replay := ReplaySettings.from_config(config)) is not None:
        from ..replay.routing_replay import RoutingReplay

        yield RoutingReplay(run, replay)
    elif (mode := read_megatron_mode(config)) is not None:
        from ..replay.megatron_engine import MegatronReplay

        yield MegatronReplay(mode)
    if (snapshots := SnapshotSettings.from_config(config)) is not None:
        yield WeightSnapshots(run, snapshots)
    if (staleness := StalenessSettings.from_config(config)) is not None:
        from ..staleness.staleness_limit import StalenessLimit

        yield StalenessLimit(run, staleness)
