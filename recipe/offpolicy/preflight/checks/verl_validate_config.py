"""verl's own validation of a launch, run before Ray starts."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_patches.execution_path import FULLY_ASYNC, find_program_mode

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from .config_reader import ACTOR, copy_config

_BATCH = "data.train_batch_size"
_ROWS = "actor_rollout_ref.rollout.n"
_LORA = ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank")
_INDIVISIBLE = re.compile(r"real_train_batch_size \(\d+\) must be divisible by minimal possible batch size \((\d+)\)")
_BELOW = re.compile(r"train_batch_size \(\d+\) must be >= actor\.ppo_mini_batch_size \(\d+\)")
_UNSET = re.compile(r"Please set at least one of '[\w.]+' or '([\w.]+)'")
_BOTH = re.compile(r"You have set both '([\w.]+)' AND '[\w.]+'")


def check_by_verl(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Run verl's ``validate_config`` on a copy and report what it refuses.

    Left to the launch: the critic, for which verl loads the model, and the rank of LoRA, for which it imports vLLM.
    """
    if find_program_mode(config) == FULLY_ASYNC:
        return  # whose program does not run it
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    tried = copy_config(config)
    with open_dict(tried):
        for key in _LORA:
            if OmegaConf.select(tried, key):
                OmegaConf.update(tried, key, 0)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config=tried, use_reference_policy=need_reference_policy(tried), use_critic=False)
    except ImportError:
        return  # of this machine, which need not be the one that trains
    except Exception as error:  # of any type: it would stop the launch
        cause = error.__cause__ or error
        yield _build_problem(config, " ".join(str(cause).split()) or type(cause).__name__)


def _build_problem(config: DictConfig, said: str) -> Problem:
    """Build the problem of verl's refusal, by the key that its message is about, if known."""
    reason = f"verl's own validation refuses it: {said.rstrip('.')}."
    if found := _INDIVISIBLE.search(said):
        return _build_override(config, _BATCH, _find_divisible_batch(config, int(found[1])), reason)
    if _BELOW.search(said):
        key = f"{ACTOR}.ppo_mini_batch_size"
        return _build_override(config, key, OmegaConf.select(config, _BATCH), reason)
    if found := _UNSET.search(said):
        return _build_override(config, _complete_key(found[1]), 1, reason)
    if found := _BOTH.search(said):
        return _build_override(config, _complete_key(found[1]), None, reason)
    return Problem("", None, reason, "")


def _complete_key(named: str) -> str:
    """Complete a key in verl's message, which names keys of the actor without the section above."""
    return f"actor_rollout_ref.{named}" if named.startswith("actor.") else named


def _find_divisible_batch(config: DictConfig, divisor: int) -> int:
    """Find the next batch size whose rows are a multiple of ``divisor``."""
    rows = int(OmegaConf.select(config, _ROWS))
    batch = int(OmegaConf.select(config, _BATCH))
    return next(size for size in range(batch, batch + divisor + 1) if size * rows % divisor == 0)


def _build_override(config: DictConfig, key: str, value: object, reason: str) -> Problem:
    override = set_to(key, value)
    return Problem(key, OmegaConf.select(config, key), reason, f"Set {override}.", overrides=(override,))
