"""Hydra callback that checks launches of any verl program with our sections, and adds our hooks to the workers."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.contract import PatchError, demand_release
from verl_patches.hydra_sections import settle_flash_attention
from verl_patches.runtime_env import KEY, MODEL_RUNNER, VARIABLES_OF_WORKERS, forward

from .correction import CorrectionSpec, SpecError
from .correction.problem import CheckError
from .fault_tolerance.redaction import redact_streams
from .preflight.checks.path import list_patch_groups
from .preflight.checks.readable import find_missing_actor
from .preflight.checks.rollout import needs_model_runner
from .preflight.examination import Preflight, examine
from .preflight.hydra_groups import read_task_overrides
from .preflight.python_source import OURS, check_program_trains, find_launched, is_own
from .trainer.hooked import MODULE, mark


def prepare(config: DictConfig, program: str = OURS) -> tuple[CorrectionSpec, Preflight]:
    """Run the start-up checks, print the active settings, and switch off verl's idle correction, in place.

    Args:
        config: the launch's composed configuration.
        program: the program, as ``python -m`` names it.

    Returns:
        The correction to train with, and the result of the start-up checks.

    Raises:
        CheckError: the launch has problems; all of them are reported at once.
    """
    found = examine(config, read_task_overrides(), say=say, own_main=is_own(program))
    if found.spec is None or found.stopping:
        raise CheckError(found.stopping)
    if not found.spec.is_none and not found.run.active:
        # With its default values, verl's helper corrects nothing, but still runs every step over the padded batch.
        with open_dict(config):
            config.algorithm.rollout_correction = None
    return found.spec, found


def say(line: str) -> None:
    """Print a line of this package's output."""
    print(f"offpolicy: {line}", flush=True)


def check(config: DictConfig, program: str = OURS) -> list[str]:
    """Run all checks on a launch, and add the values that the launch's workers need to its configuration.

    Returns:
        Lines that describe what would be trained.

    Raises:
        CheckError, PatchError: the launch has a problem.
    """
    attention = settle_flash_attention(config)
    spec, found = prepare(config, program)
    if needs_model_runner(found.run) and found.run.get(f"{KEY}.env_vars.{MODEL_RUNNER}") is None:
        os.environ.setdefault(MODEL_RUNNER, "1")
    forward(config, groups=list_patch_groups(found.run.path), modules=(MODULE,))
    mark(config)
    done = f"all checks passed; {json.dumps(spec.to_mapping())}, fingerprint {spec.fingerprint()}"
    return [str(found.run.path), *attention, done, *(f"{problem.verdict}: {problem}" for problem in found.remarks)]


class LaunchCallback(Callback):
    """Hydra callback that checks a launch before verl's own main begins. Hydra only logs exceptions of callbacks, so
    this callback exits.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        redact_streams()
        try:
            demand_release()
            with open_dict(config):
                hydra = config.pop("hydra")
            try:
                HydraConfig.instance().set_config(OmegaConf.create({"hydra": hydra}))
                program = find_launched()
                if missing := [*check_program_trains(program), *find_missing_actor(config)]:
                    raise CheckError(missing)
                lines = check(config, program)
            finally:
                with open_dict(config):
                    config.hydra = hydra
        except (SpecError, CheckError, PatchError, OmegaConfBaseException) as error:
            sys.exit(f"offpolicy: stopped before anything was started.\n{error}")
        except Exception as error:  # otherwise Hydra would log a warning and train uncorrected
            traceback.print_exc()
            sys.exit(f"offpolicy: an internal error stopped the launch before anything was started: {error}")
        for line in lines:
            say(line)
        _share_with_local_ray(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        sys.exit("offpolicy: --multirun starts several runs, but only one is checked. Fix: launch each run separately.")


def _share_with_local_ray(config: DictConfig) -> None:
    """Also set the variables in this process, for programs that start Ray without ``ray_kwargs``."""
    given = OmegaConf.select(config, f"{KEY}.env_vars") or {}
    os.environ.update({name: str(given[name]) for name in VARIABLES_OF_WORKERS if name in given})
