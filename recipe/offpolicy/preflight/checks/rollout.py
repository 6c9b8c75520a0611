"""Checks of the rollout's sampling distribution and of the log-probs that the engine returns."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path
from verl_patches.runtime_env import KEY as RUNTIME_ENV

from ...correction import CorrectionSpec
from ...correction.problem import MU, Problem, set_to
from ...correction.spelling import find_closest
from ..model_config import find_local
from ..model_tensors import count_largest_tensor
from ..verl_keys.keys import list_active
from .config_reader import ACTOR, ENGINE, ROLLOUT, needs_mu

_NEUTRAL = {"top_p": (1, 1.0), "top_k": (-1, 0), "min_p": (0, 0.0), "repetition_penalty": (1, 1.0)}
_KEEP = {
    "top_p": "replay the tokens that are left with correction.support=engine, ",
    "top_k": "replay the tokens that are left with correction.support=engine, ",
    "min_p": "ask for it by correction.support=engine and correction.support_min_p, ",
}
_GENERATION = f"{ENGINE}.override_generation_config"
# vLLM takes its arguments with either spelling.
_MODES = tuple(
    f"{owner}.{name}"
    for owner, name in ((ROLLOUT, "logprobs_mode"), (ENGINE, "logprobs_mode"), (ENGINE, "logprobs-mode"))
)


UNTESTED_ENGINES = ("sglang", "trtllm")
"""Rollout engines of verl's that return log-probs, with which nothing was run."""
_WITHOUT_LOG_PROBS = ("hf", "naive")
"""Rollout engines of verl's releases that return none."""
_VARIABLES = {"sglang": "SGLANG_RETURN_ORIGINAL_LOGPROB", "trtllm": "TLLM_USE_TORCHSAMPLER"}
"""By which an engine returns raw log-probs: TensorRT-LLM's TorchSampler does unless a request says otherwise."""
_SAMPLER, _SAMPLER_OF_VERL = f"{ROLLOUT}.engine_kwargs.trtllm.sampler_type", "TRTLLMSampler"


def check_rollout_log_probs(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that mu is computed, by an engine whose log-probs are tested."""
    if not needs_mu(config, spec):
        return
    key = f"{ROLLOUT}.calculate_log_probs"
    if not OmegaConf.select(config, key):
        reason = "without the engine's log-probs there is no mu to correct with."
        value = OmegaConf.select(config, key)
        yield Problem(key, value, reason, "Set it to true.", "NO-OP", MU, (set_to(key, True),))
    if spec.proximal == "same_engine":  # the first step checks each of them
        return
    # verl has no default for the engine, and says so itself when it is left out.
    key = f"{ROLLOUT}.name"
    engine, known = OmegaConf.select(config, key), ("vllm", *UNTESTED_ENGINES)
    if engine in _WITHOUT_LOG_PROBS:
        reason = "no engine of verl's that returns the log-probs that it sampled with."
        yield Problem(key, engine, reason, f"Set it to vllm, {' or '.join(UNTESTED_ENGINES)}.", parts=MU)
    elif engine not in known and (near := find_closest(str(engine or ""), known)):
        fix, override = f"Did you mean {near}?", set_to(key, near)
        yield Problem(key, engine, "verl has no such engine.", fix, parts=MU, overrides=(override,))


def check_logprobs_mode(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Refuse log-probs of the raw logits, before temperature, by the keys and variables that the engine reads."""
    if not (needs_mu(config, spec) or list_active(config)):
        return
    reason = "raw log-probs leave temperature out, so mu is not the distribution that was sampled from."
    engine = OmegaConf.select(config, f"{ROLLOUT}.name")
    if engine not in UNTESTED_ENGINES:
        for key in _MODES:
            mode = OmegaConf.select(config, key, default="processed_logprobs")
            if mode != "processed_logprobs":
                override = set_to(key, "processed_logprobs")
                yield Problem(key, mode, reason, "Set processed_logprobs.", parts=MU, overrides=(override,))
        return
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature == 1:  # raw and processed log-probs are the same
        return
    beside = {f"{ROLLOUT}.temperature": temperature}
    name = _VARIABLES[engine]
    key = f"{RUNTIME_ENV}.env_vars.{name}"
    for owner, value in ((key, OmegaConf.select(config, key)), (name, os.environ.get(name))):
        if str(value).lower() in ("1", "true"):
            overrides = (f"~{owner}",) if owner == key else ()
            fix = f"Unset {name} in the environment of the launch." if owner == name else f"Remove {key}."
            yield Problem(owner, value, reason, fix, parts=MU, overrides=overrides, beside=beside)
    sampler = OmegaConf.select(config, _SAMPLER)
    if engine == "trtllm" and sampler not in (None, _SAMPLER_OF_VERL):
        override = set_to(_SAMPLER, _SAMPLER_OF_VERL)
        yield Problem(_SAMPLER, sampler, reason, parts=MU, overrides=(override,), beside=beside)


def check_sampling(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Refuse sampling distributions that no ratio of full policies can correct."""
    if not (needs_mu(config, spec) or list_active(config)):
        return
    temperature, at = config.actor_rollout_ref.rollout["temperature"], f"{ROLLOUT}.temperature"
    if not OmegaConf.select(config, f"{ROLLOUT}.do_sample", default=True) or not temperature:
        reason = "greedy decoding samples from no distribution that a ratio could correct."
        fix = f"Set {ROLLOUT}.do_sample=true and a temperature > 0."
        overrides = (set_to(f"{ROLLOUT}.do_sample", True), set_to(at, temperature or 1.0))
        yield Problem(at, temperature, reason, fix, parts=MU, overrides=overrides)
    key = f"{_GENERATION}.temperature"
    of_engine = OmegaConf.select(config, key, default=None)
    if of_engine is not None and of_engine != temperature:
        reason = (
            f"a request that names no temperature is sampled at this one, and the trainer divides its logits by "
            f"{at}={temperature}."
        )
        fix, overrides = f"Set {at}={of_engine}, and leave this out.", (set_to(at, of_engine), f"~{key}")
        yield Problem(key, of_engine, reason, fix, parts=MU, overrides=overrides)
    if not spec.allow_truncated_sampling:
        yield from _check_truncation(config, spec)


def check_bucket(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that the largest tensor of the model fits the bucket in which weights go to the rollout engine.

    verl asserts it at the first synchronisation, after both engines have started, unless the release can send a large
    tensor by a CUDA handle.
    """
    on_cpu = OmegaConf.select(config, "trainer.device") == "cpu" or os.environ.get("VERL_PLATFORM") == "cpu"
    key = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    size, model = (OmegaConf.select(config, each) for each in (key, "actor_rollout_ref.model.path"))
    if not isinstance(size, int) or not isinstance(model, str):
        return
    if live_path(config).attributes.large_tensors and not on_cpu:
        return
    file = find_local(model)
    elements = count_largest_tensor(file.parent) if file is not None else None
    if elements is None:
        return
    megatron = config.actor_rollout_ref.actor.strategy == "megatron"
    dtype_key = f"{ACTOR}.{'megatron.dtype' if megatron else 'fsdp_config.model_dtype'}"
    dtype = str(OmegaConf.select(config, dtype_key, default="fp32"))
    needed = math.ceil(elements * (2 if "16" in dtype else 4) / 2**20)
    if needed > size:
        reason = f"the largest tensor of {model} has {elements} elements of {dtype}, {needed} MiB, and is sent whole."
        yield Problem(key, size, reason, overrides=(set_to(key, needed + 1),))


def check_consent(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that ``allow_truncated_sampling`` has a correction that reads mu."""
    if spec.allow_truncated_sampling and not (needs_mu(config, spec) or list_active(config)):
        key = "correction.allow_truncated_sampling"
        reason = "there is no correction whose mu it could be about."
        yield Problem(key, True, reason, parts=(), overrides=(set_to(key, False),))


def _check_truncation(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    untested = OmegaConf.select(config, f"{ROLLOUT}.name") in UNTESTED_ENGINES
    for name, values in _NEUTRAL.items():
        for owner in (ROLLOUT, ENGINE, _GENERATION):
            key = f"{owner}.{name}"
            # What verl asks of the engine with each request.
            if spec.support is not None and owner == ROLLOUT and name in ("top_p", "top_k"):
                continue
            value = OmegaConf.select(config, key, default=None)
            keep = "" if untested else _KEEP.get(name, "")
            otherwise = f"{keep}or say that it is meant: correction.allow_truncated_sampling=true."
            if spec.support is not None:
                otherwise = "or correction.support=null."
            if value is not None and value not in values:
                cut = "tokens are sampled from" if untested else "mu is renormalised over"
                reason = (
                    f"{cut} those that are left, and pi_old is over all: the ratio is off by the mass that was cut."
                )
                yield Problem(key, value, reason, f"Set {key}={values[0]}, {otherwise}", parts=MU)
