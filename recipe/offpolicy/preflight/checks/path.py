"""Checks that the path from the rollout to the gradient is covered: verl's functions, programs, engines and workers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

import verl_patches
from verl_patches import legacy, rollout_seams, trainer_seams, worker_seams
from verl_patches.contract import Contract, PatchError, check_all
from verl_patches.execution_path import FULLY_ASYNC, LEGACY, STRATEGY, USE_V1, LivePath, describe_mode
from verl_patches.releases import TESTED
from verl_patches.runtime_env import KEY, ContradictionError, forward

from ...correction.correction_parts import WITHOUT_FORWARD
from ...correction.problem import CheckError, Problem, set_to
from ...support.support_settings import CENTERING, SUPPORT
from ..composed import (
    ACTOR,
    BACKEND,
    ENGINE,
    ESTIMATOR,
    FSDP,
    MEGATRON,
    MODE,
    MODEL,
    NAME,
    PROXIMAL,
    ROLLOUT,
    SHADOW,
    SUPPORT_PART,
    UNTESTED_ENGINES,
    VERLS_LOOPS,
    WITHOUT_PI_OLD,
    Composed,
)
from ..python_source import check_contracts
from .correction import list_masks, list_weights

Hold = Callable[[Iterable[Contract]], None]
"""Checks contracts against the installed verl; raises PatchError if a contract is violated."""
STRATEGIES = ("fsdp", "fsdp2", "megatron")
"""Training engines that are covered, and engines that a legacy actor can have."""
_SEPARATE, _SYNC_STEP = "separate_async", "trainer.v1.separate_async.parameter_sync_step"
_REMOVE_PADDING = f"{MODEL}.use_remove_padding"
_MERGE, _ADAPTER, _FORMAT = f"{MODEL}.lora.merge", f"{MODEL}.lora_adapter_path", f"{ROLLOUT}.load_format"
_RANKS = {"fsdp": f"{MODEL}.lora_rank", "megatron": f"{MODEL}.lora.rank"}
_ALPHAS = {"fsdp": f"{MODEL}.lora_alpha", "megatron": f"{MODEL}.lora.alpha"}


def check_seams(run: Composed) -> Iterator[Problem]:
    """Check in verl's source that every patched function on this path has the expected signature."""
    return check_seams_by(check_contracts, run)


def demand_seams(config: DictConfig) -> None:
    """Import and check every patched function of the active path; the training process imports them anyway.

    Raises:
        CheckError: a contract is violated, e.g. because a plugin has replaced a function that verl's source shows.
    """
    if problems := list(check_seams_by(check_all, Composed(config))):
        raise CheckError(problems)


def check_seams_by(hold: Hold, run: Composed) -> Iterator[Problem]:
    """Check the patched functions of a path by calling ``hold``; functions of the legacy actors are always imported."""
    path, release = run.path, run.path.attributes
    v1 = path.trainer == "v1"
    try:
        verl_patches.status()
        for held, seams in (
            (True, worker_seams.LOSS),
            (True, trainer_seams.V1 if v1 else trainer_seams.V0),
            (not v1 and path.asynchronous and release.separate_programs, trainer_seams.PROGRAMS),
            (v1 and release.staleness_limit and run.staleness is not None, trainer_seams.STALENESS),
            (run.notes_token_versions, rollout_seams.VERSIONS),
            (run.replay is not None, worker_seams.ROUTER_REPLAY),
            (release.truncated_support and bool(run.support or run.centering), rollout_seams.SUPPORT),
        ):
            if held:
                hold(seams)
        if path.worker == "legacy":
            legacy.check(path.strategy)
    except PatchError as error:
        yield run.problem("verl", str(error), value=path.release)


def check_version_level(run: Composed) -> Iterator[Problem]:
    """Check that verl records the weight versions that ``level=version`` reads."""
    reason = run.unknown_versions or run.unknown_age
    if reason is None:
        return
    leveled: list[tuple[str, Any]] = [*list_weights(run), *list_masks(run)]
    for part, each in leveled:
        if each.level == "version":
            key = f"correction.{part}.level"
            fix = f"Set {key}=turn or {key}=sequence."
            yield run.problem(key, reason, fix, {key: "sequence"}, (part,), value="version")
    left = [name for name, shadow in run.shadows.items() if "version" not in shadow.levels]
    for name in run.shadows:
        if name not in left:
            said, sets = f"its level is version, and {reason}", {SHADOW: left}
            yield run.problem(SHADOW, said, f"Set {set_to(SHADOW, left)}.", sets, (f"shadow.{name}",), value=name)


def check_path(run: Composed) -> Iterator[Problem]:
    """Check that this path of verl is supported."""
    path, release = run.path, run.path.attributes
    legacy_worker, megatron = path.worker == "legacy", path.strategy == "megatron"
    of_worker = run.get(LEGACY)
    if of_worker not in (None, "auto", "enable", "disable"):
        yield run.problem(LEGACY, "verl supports auto, enable and disable.", "", {LEGACY: "auto"})
    elif of_worker in ("auto", "enable") and not release.legacy_actors:
        reason = f"verl {path.release} has no legacy actors and does not read this key."
        yield run.problem(LEGACY, reason, "", {LEGACY: "disable"})
    if run.get(USE_V1) and not release.v1_modes:
        reason = f"verl {path.release} has no V1 trainer and does not read this key."
        yield run.problem(USE_V1, reason, "", {USE_V1: False})
    yield from _check_mode(run)
    if path.strategy not in STRATEGIES:
        fix = f"No override corrects {path.strategy}: train with fsdp2 or megatron, or without a correction."
        yield run.problem(STRATEGY, "the correction supports only the FSDP and Megatron engines.", fix)
    overlap = f"{MEGATRON}.override_transformer_config.overlap_moe_expert_parallel_comm"
    for key, read, reason in (
        (
            *(f"{ACTOR}.use_prefix_grouper", legacy_worker),
            "the legacy actor's update cannot read the output of its own forward pass.",
        ),
        (
            *(f"{MEGATRON}.dynamic_context_parallel", megatron and not legacy_worker),
            "the correction has not been tested with this way of gathering metrics.",
        ),
        (
            *(overlap, megatron and legacy_worker),
            "this schedule fetches a micro-batch while the loss of another is computed.",
        ),
    ):
        if read and run.get(key):
            yield run.problem(key, reason, "", {key: False})
    if not run.get(_REMOVE_PADDING) and release.engine_attends_by_loss_mask and not legacy_worker:
        who = f"verl {path.release}'s engine masks attention by the loss mask"
        reason, fix = f"{who}, so its log-probs differ from the model's.", f"Set it to true, or {LEGACY}=enable."
        yield run.problem(_REMOVE_PADDING, reason, fix, {_REMOVE_PADDING: True})


def _check_mode(run: Composed) -> Iterator[Problem]:
    path, newest = run.path, TESTED[-1]
    if path.trainer == "v0" and path.asynchronous and not path.attributes.separate_programs:
        reason = (
            f"the correction does not cover {path.mode}_policy of verl {path.release}, but it covers that of "
            f"verl {newest}."
        )
        where, value = describe_mode(run.config)
        yield run.problem(where, reason, f"Install verl {newest}.", value=value)
    if path.trainer != "v1":
        return
    mode, covered = run.config.trainer.v1.trainer_mode, path.attributes.v1_modes
    if mode not in covered:
        reason, fix = "not covered by the correction.", f"Set one of {', '.join(covered)}."
        proposed = _find_nearest_mode(mode, covered)
        if mode == _SEPARATE:
            reason = (
                f"this mode was tested only with verl {newest}; verl {path.release} warms up, routes requests and "
                f"lends GPUs differently, and may not record the version of each token."
            )
            fix = f"Set {MODE}={proposed}, or install verl {newest}."
        yield run.problem(MODE, reason, fix, {MODE: proposed})
    elif mode == _SEPARATE and (key := _find_aliased_snapshot(run)):
        reason = (
            "verl keeps references, not copies, of offloaded weights, so restoring pi_old's weights undoes updates."
        )
        yield run.problem(key, reason, f"Set it to false, or {_SYNC_STEP}=1.", {key: False}, value=True)


def _find_nearest_mode(mode: object, covered: Sequence[str]) -> str:
    """Find the covered mode nearest to an uncovered one; an asynchronous mode must not become sync."""
    given = str(mode).lower()
    among = [each for each in covered if each != "sync" or "a" not in given] or list(covered)
    # Modes of other programs, such as fully_async, separate sampling from training.
    return next(iter(difflib.get_close_matches(given, among, 1, 0.65)), among[-1])


def _find_aliased_snapshot(run: Composed) -> str | None:
    """Find the key that keeps weights on the CPU, where verl's snapshots alias them instead of copying."""
    # On the CPU, verl_patches.cpu copies them.
    copied = run.get("trainer.device") == "cpu" or run.get(_SYNC_STEP) == 1 or run.get(PROXIMAL) in WITHOUT_FORWARD
    if copied or run.path.strategy != "fsdp2":
        return None
    keys = (f"{ACTOR}.fsdp_config.{name}" for name in ("param_offload", "offload_policy"))
    return next((key for key in keys if run.get(key)), None)


def check_program(run: Composed) -> Iterator[Problem]:
    """Reject keys that need this package's code in the other processes of an asynchronous program."""
    if run.path.mode == _SEPARATE and run.get(BACKEND) == "naive":
        reason = "trainer_mode=separate_async has its own servers, and verl cannot send weights to them in this way."
        yield run.problem(BACKEND, reason, "", {BACKEND: "nccl"})
    for key, part in ((SUPPORT, SUPPORT_PART), (CENTERING, "centering")):
        if run.program is not None and run.get(key) is not None:
            reason = f"{run.program}_policy samples in processes that do not return the likeliest tokens."
            yield run.problem(key, reason, f"Set {key}=null.", (), (part,))
    if run.program != FULLY_ASYNC:
        return
    loop = run.get(f"{ROLLOUT}.agent.default_agent_loop")
    if loop not in (None, VERLS_LOOPS[0]) and not run.get(enabled := f"{ROLLOUT}.multi_turn.enable"):
        reason = f"fully_async_policy runs {VERLS_LOOPS[0]} instead unless {enabled} is true: no tool would be called."
        yield run.problem(f"{ROLLOUT}.agent.default_agent_loop", reason, "", {enabled: True}, value=loop)
    for extension in run.extensions:
        reason = f"{FULLY_ASYNC}_policy samples and validates in a process that does not load the extension."
        for key, fix in extension.needs_rollouter.items():
            value = "on" if key == extension.section else run.get(key)
            yield run.problem(key, reason, fix, (), (extension.section,), value=value)


def check_lora(run: Composed) -> Iterator[Problem]:
    """Check that LoRA is trained, and that the rollout engine receives it, merged or as an adapter."""
    path = run.path
    own, other = ("megatron", "fsdp") if path.strategy == "megatron" else ("fsdp", "megatron")
    key = _RANKS[own]
    if not run.get(key):
        yield from _find_unread_lora(run, own, other)
        return
    legacy_fsdp = path.worker == "legacy" and own == "fsdp"
    merges = own == "megatron" or (path.attributes.merged_lora and not legacy_fsdp)
    backend, engine = run.get(BACKEND), run.get(NAME)
    apart = run.program is not None or path.mode == _SEPARATE or backend not in (None, "naive")
    adapters = not apart and {"trtllm": False, "sglang": own in path.attributes.sglang_adapters}.get(str(engine), True)
    merged = bool(run.get(_MERGE))
    alongside: dict[str, Any] = {_MERGE: merged}
    sets: dict[str, Any] = {}
    if merged and not merges:
        reason = f"verl {path.release} sends the base weights without the adapter, so rollouts never use an update."
        if legacy_fsdp:
            reason = "the legacy actor does not merge adapters, and the rollout engine would reject them."
        sets = {_MERGE: False} if adapters else {}
    elif apart and backend == "delta_sharded":
        reason, alongside = "this checkpoint engine does not support LoRA.", {BACKEND: backend}
        sets = {BACKEND: "nccl", _MERGE: True} if merges else {}
    elif not merged and not adapters:
        who = "a checkpoint engine sends" if apart else f"{engine} under verl {path.release} loads"
        reason = f"{who} the base weights without the adapter, so rollouts would never use an update."
        alongside[BACKEND if apart else NAME] = backend if apart else engine
        sets = {_MERGE: True} if merges else {}
    elif legacy_fsdp and "dummy" in str(run.get(_FORMAT)):
        reason = "the first rollouts after a resume, or with an initial adapter, use the base weights."
        alongside, sets = {_FORMAT: run.get(_FORMAT)}, {_FORMAT: "safetensors"}
    else:
        return
    fix = "" if sets else "No setting of this release delivers the adapter: train without LoRA, or use verl 0.9.1."
    yield run.problem(key, reason, fix, sets, alongside=alongside)


def _find_unread_lora(run: Composed, own: str, other: str) -> Iterator[Problem]:
    """Find LoRA keys that this trainer's engine does not read; such an engine would train all weights."""
    if rank := run.get(_RANKS[other]):
        alpha = run.get(_ALPHAS[other])
        sets = {_RANKS[own]: rank} | ({} if alpha is None else {_ALPHAS[own]: alpha})
        reason = f"{own} does not read this key, and would train all weights."
        yield run.problem(_RANKS[other], reason, "", sets, translated=True)
    elif own == "fsdp" and run.get(_ADAPTER):
        reason = f"without {_RANKS[own]} the adapter is not loaded, and all weights would be trained."
        yield run.problem(_ADAPTER, reason, f"Set {_RANKS[own]} to the rank of this adapter.")


def list_patch_groups(path: LivePath) -> list[str]:
    """List the groups of patches that the workers of this path load."""
    return ["legacy"] if path.worker == "legacy" else []


def check_workers_env(run: Composed) -> Iterator[Problem]:
    """Check for environment variables whose value in the workers differs from the value in this process."""
    given = run.get(KEY)
    if given is not None and not isinstance(given, DictConfig):
        reason = "not a mapping, but Ray's runtime environment must be one."
        yield run.problem(KEY, reason, sets=(f"{KEY}={{}}",))
        return
    tried = OmegaConf.create({})
    if given is not None:
        OmegaConf.update(tried, KEY, OmegaConf.to_container(given, resolve=True), force_add=True)
    try:
        forward(tried, list_patch_groups(run.path))
    except ContradictionError as error:
        said = (error.reason, error.fix) if error.key else (str(error),)
        yield run.problem(error.key or "", *said, value=error.value if error.key else None)


_LORA_RANK = f"{MODEL}.lora_rank"
_NOT_TESTED = {
    f"{ACTOR}.ulysses_sequence_parallel_size": "sequences split over ranks (Ulysses)",
    f"{FSDP}.ulysses_sequence_parallel_size": "sequences split over ranks (Ulysses)",
    f"{MEGATRON}.context_parallel_size": "sequences split over ranks (context parallelism)",
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": "interleaved pipelines",
    f"{ROLLOUT}.data_parallel_size": "data parallelism within a rollout server",
    f"{ROLLOUT}.expert_parallel_size": "expert parallelism within a rollout server",
    f"{ROLLOUT}.pipeline_model_parallel_size": "pipelines within a rollout server",
    _LORA_RANK: "LoRA with this trainer",
    f"{MODEL}.lora.rank": "LoRA on Megatron",
    f"{MODEL}.use_fused_kernels": "fused kernels of the log-probs",
    f"{MODEL}.use_liger": "Liger's kernels",
    f"{MODEL}.tiled_mlp.enabled": "a tiled MLP",
    f"{MODEL}.mtp.enable": "multi-token prediction",
    f"{ACTOR}.use_prefix_grouper": "grouped prefixes",
    f"{ROLLOUT}.disaggregation.enabled": "prefill separate from decoding",
    "async_training.use_trainer_do_validate": "validation on the trainer's devices",
    "async_training.use_dynamic_resource_scheduling": "rollouts on the trainer's devices",
    f"{FSDP}.qat.enable": "training for quantised weights",
    f"{MEGATRON}.qat.enable": "training for quantised weights",
    f"{ACTOR}.freeze_vision_tower": "models with images",
    f"{ROLLOUT}.quantization": "a quantised rollout engine",
    f"{ENGINE}.quantization": "a quantised rollout engine",
    f"{ROLLOUT}.limit_images": "models with images",
    f"{MODEL}.lora_adapter_path": "LoRA that starts from an adapter",
    f"{MODEL}.lora.adapter_path": "LoRA that starts from an adapter",
    f"{ENGINE}.speculative_config": "speculative decoding",
}
"""Keys that enable an untested feature if they are true, a number > 1 (LoRA: > 0), or any other non-empty value."""
_DTYPES = (f"{ROLLOUT}.dtype", f"{ENGINE}.kv_cache_dtype", f"{ENGINE}.kv-cache-dtype")


def warn_not_shown(run: Composed) -> Iterator[Problem]:
    """Warn about devices, estimators, kernels and layouts that have not been tested with a correction."""
    for key, what in () if run.spec.is_none and not run.active else _find_not_shown(run):
        reason = (
            f"corrections have not been tested with {what}: the first update either proves this correction or stops "
            f"the run."
        )
        if key in _DTYPES or key.endswith(".quantization"):
            reason += " Quantised weights cannot be compared; offpolicy.delivery.probe=1 compares log-probs instead."
        yield run.problem(key, reason, "", (), (), "NOTE")


def _find_not_shown(run: Composed) -> Iterator[tuple[str, str]]:
    if (engine := run.get(NAME)) not in (None, "vllm"):
        owner = "this" if engine in UNTESTED_ENGINES else "a program's own"
        condition = "which must return the log-probs of the sampled tokens at the run's temperature"
        yield NAME, f"{owner} rollout engine, {condition}"
    if (device := run.get("trainer.device")) not in (None, "cuda", "cpu"):
        yield "trainer.device", f"{device} devices"
    if (estimator := run.get(ESTIMATOR)) is not None and estimator not in WITHOUT_PI_OLD:
        yield ESTIMATOR, "estimators that read pi_old, or that are the user's own"
    for key in _DTYPES:
        if "fp8" in str(value := run.get(key)) or "int8" in str(value):
            yield key, f"rollouts in {value}"
    # LoRA on FSDP was tested on V1 and, if merged, also on V0 and in one_step_off_policy (docs/paths.md).
    merged = run.path.worker == "engine" and run.get(_MERGE) and run.program != FULLY_ASYNC
    tested = {_LORA_RANK} if run.path.trainer == "v1" or merged else set()
    for key, what in _NOT_TESTED.items():
        value = run.get(key)
        number = isinstance(value, int) and not isinstance(value, bool)
        requested = value > (0 if "lora" in key else 1) if number else value not in (None, "", False)
        if requested and key not in tested and not (run.path.worker == "legacy" and "ulysses" in key):
            yield key, what
