"""Mixin of every corrected trainer: the watchdog around verl's own, and checkpoints that stay loadable."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_patches.trainer_v0 import plain_advantage

from ..batch.rewards import BY_KL, check_rewards
from ..extensions.hooks import ExtensionHooks
from ..fault_tolerance.checkpoints import check_before_loading, extension_states, guard_save
from ..fault_tolerance.redaction import redact_streams
from ..fault_tolerance.watchdog import watch
from ..monitor.active_correction import find_differences
from ..preflight.checks import read_spec
from ..preflight.verl_keys.estimators import OUTCOME
from ..proof.dense_rewards import DenseRewardGuard, ScoredRows
from ..recording.run import AFTER_FAILURE, PATIENCE, RunRecord
from .logging_setup import set_up_logger

if TYPE_CHECKING:
    from .supervision import Supervision


logger = logging.getLogger("verl.offpolicy")


class SupervisedRun:
    """Mixin of verl's V0 and V1 trainers.

    Seams, the same from verl 0.7.1 to 0.9.1: ``fit``, ``_save_checkpoint(self)``, ``_load_checkpoint(self)``,
    ``_validate(self, ...)``, ``_val_metrics_update(self, data_sources, sample_uids, reward_extra_infos_dict, ...)``,
    and what ``watchdog.PHASES`` lists.
    """

    config: DictConfig
    global_steps: int
    recording: RunRecord | None = None
    extensions: ExtensionHooks = ExtensionHooks()
    supervision: Supervision
    train_dataloader: Any
    _validating: bool = False
    _begun: bool = False
    _resumed: Mapping[str, Any] | None = None
    """What a checkpoint that was loaded says of alarms and bounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        redact_streams()
        set_up_logger()
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        """Begin what watches and extends the run; verl's constructor has set the configuration."""
        self._begun = True
        watchdog = watch(self, self.config)
        self.extensions = ExtensionHooks.begin(self.config, nullcontext if watchdog is None else watchdog.phase)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        with self._finishing() as finishing:
            result = super().fit(*args, **kwargs)  # type: ignore[misc]
            if inspect.isawaitable(result):
                finishing.pop_all()
                return self._await_fit(result)
            return result

    async def _await_fit(self, result: Any) -> Any:
        with self._finishing():
            return await result

    @contextmanager
    def _finishing(self) -> Iterator[ExitStack]:
        """Finish the recording and the extensions when the context ends."""
        with ExitStack() as stack:
            stack.callback(self._end_extensions)
            # Workers are killed after this: the update that decided may not be written yet.
            failed = stack.enter_context(ExitStack())
            failed.callback(self._finish_recording, AFTER_FAILURE)
            yield stack
            failed.pop_all()
            stack.callback(self._finish_recording, PATIENCE)

    def _finish_recording(self, patience: float) -> None:
        try:
            if self.recording is not None:
                self.recording.finish(patience)
        except Exception:  # never in the place of what ended the run
            logger.warning("cannot see whether the last step is recorded.", exc_info=True)

    def _end_extensions(self) -> None:
        try:
            self.extensions.end()
        except Exception:  # never in the place of what ended the run
            logger.warning("an extension did not end as it should.", exc_info=True)

    @cached_property
    def _dense_rewards(self) -> DenseRewardGuard:
        return DenseRewardGuard(self.config, plain_advantage(), OUTCOME)

    def _check_rewards(self, batch: ScoredRows) -> None:
        """Stop a run whose rewards are not finite, or whose rewards by token the estimator sums."""
        check_rewards(batch.scores, batch.uids, f"step {batch.step}")
        self._dense_rewards.check(batch)

    def _check_kl_in_reward(self, batch: Any) -> None:
        """Stop a run of whose rewards the KL with the reference is not finite; they are read once it is subtracted."""
        if OmegaConf.select(self.config, "algorithm.use_kl_in_reward"):
            rewards = batch.rows("token_level_rewards")["token_level_rewards"]
            check_rewards(rewards, batch.uids, f"step {batch.step}", BY_KL)

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        self._validating = True
        try:
            return self.extensions.validate(self, partial(super()._validate, *args, **kwargs))  # type: ignore[misc]
        finally:
            self._validating = False

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rewards = torch.tensor(list(reward_extra_infos_dict.get("reward", ())), dtype=torch.float64)
        check_rewards(rewards, sample_uids, "validation")
        found = super()._val_metrics_update(  # type: ignore[misc]
            data_sources, sample_uids, reward_extra_infos_dict, *args, **kwargs
        )
        if self.extensions:
            found |= self.extensions.validation_metrics(data_sources, sample_uids, reward_extra_infos_dict)
        return found

    @property
    def staleness_state(self) -> Mapping[str, Any] | None:
        """State of the rate limit for a checkpoint; None where there is none."""
        return None

    @property
    def checkpoint_step(self) -> int:
        """Number in the name of a checkpoint's folder."""
        return self.global_steps

    def _check_resumed(self) -> dict[str, Any] | None:
        spec, of_config = read_spec(self.config), partial(find_differences, self.config)
        return check_before_loading(self.config, spec, of_config, self.extensions.differences)

    def _save_checkpoint(self) -> None:
        active = self.supervision.active_correction.state()
        spec, staleness = read_spec(self.config), self.staleness_state
        with guard_save(self.config, self.checkpoint_step, spec, active, self.extensions.state, staleness):
            super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> Any:
        self._resumed = self._check_resumed()
        # Made by now on every trainer and not read yet; its own state comes with the checkpoint.
        if self.extensions:
            self.train_dataloader = self.extensions.load_prompts(self.train_dataloader)
        loaded = super()._load_checkpoint()  # type: ignore[misc]
        if self.extensions:
            self.extensions.restore(*extension_states(self.config))
        return loaded
