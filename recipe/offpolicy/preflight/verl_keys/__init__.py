"""Checks of verl's own correction keys that the installed release ignores where they are set.

verl keeps two copies of some settings and reads one of them, by release and by worker; the other is silently
ignored. Read from the sources of 0.7.1, 0.8.0, 0.9.0 and 0.9.1:

* ``algorithm.rollout_correction`` with ``bypass_mode``: the trainer puts mu in pi_old's place. Weights, rejections and
  ``loss_type`` are left to the worker, and are not there: the V0 trainer edits ``actor.policy_loss`` after the workers
  have got their copy, the V1 trainer does not edit it.
* ``actor.policy_loss.rollout_correction``: read by the loss ``bypass_mode`` alone.
* ``rollout.calculate_log_probs``, false by default up to 0.8.0: without it the trainer skips its correction.
* ``actor.use_rollout_log_probs``: read by the legacy FSDP actor of 0.7.1 alone.
* ``actor.router_replay``: read by the legacy Megatron actor of 0.7.1 alone. Engines read the key of that name below
  ``actor.megatron`` and ``actor.veomni``. verl's FSDP replays nothing; with our V1 trainer of 0.9.1 it does, by the key
  below ``actor.fsdp_config``.
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_patches.execution_path import LivePath

from ...correction import CorrectionSpec
from ...correction.problem import Problem
from .bypass import check_bypass, check_bypass_loss, check_legacy_mu
from .decoupled import check_decoupled
from .former_names import check_former_names, check_trainer_mode
from .keys import DEFAULTS
from .router_replay import check_router_replay


def find_dead_keys(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Problem]:
    """Find keys that this path ignores, or reads as something else than they say.

    Args:
        config: composed and complete.
        spec: our own correction. With one, all of verl's own is refused elsewhere, and so is its loss.
        path: the release, trainer and worker that will run.
    """
    yield from check_trainer_mode(config, path)
    yield from check_former_names(config, spec)
    yield from check_decoupled(config, spec, path)
    yield from check_bypass(config, spec, path)
    yield from check_bypass_loss(config, spec)
    yield from check_legacy_mu(config, path)
    yield from check_router_replay(config, spec, path)


__all__ = ["DEFAULTS", "find_dead_keys"]
