"""Checks of keys that verl itself validates only late in a run, and of keys that accept only certain names."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.execution_path import FULLY_ASYNC, USE_V1, count_prompts

from ...batch.declared_keys import flatten
from ...correction.correction_parts import WITHOUT_FORWARD
from ...correction.problem import Problem, find_closest, format_value, set_to
from ..composed import (
    ACTOR,
    BACKEND,
    BATCH,
    BYPASS,
    ESTIMATOR,
    FSDP,
    KL_IN_REWARD,
    LOSS_MODE,
    MEGATRON,
    MINI_BATCH,
    MODE,
    MODEL,
    NAME,
    ROLLOUT,
    VERL,
    Composed,
    copy_config,
    list_micro_batch_keys,
)
from ..python_source import find_source

_RESUME, _FROM = "trainer.resume_mode", "trainer.resume_from_path"
_FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
_LARGEST = 1e30
"""Largest accepted number: products of larger float32 numbers may overflow."""
_LORA = (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank")
_INDIVISIBLE = re.compile(r"real_train_batch_size \(\d+\) must be divisible by minimal possible batch size \((\d+)\)")
_BELOW = re.compile(r"train_batch_size \(\d+\) must be >= actor\.ppo_mini_batch_size \(\d+\)")
_UNSET = re.compile(r"Please set at least one of '[\w.]+' or '([\w.]+)'")
_BOTH = re.compile(r"You have set both '([\w.]+)' AND '[\w.]+'")


def check_engine_is_named(run: Composed) -> Iterator[Problem]:
    """Check that the rollout engine is named, because verl has no default."""
    if run.get(NAME) in (None, ""):
        yield run.problem(NAME, "no rollout engine is named, and verl has no default.", "", {NAME: "vllm"}, ())


def check_resume(run: Composed) -> Iterator[Problem]:
    """Check that the checkpoint from which to resume exists, and that verl would read it."""
    mode, path = run.get(_RESUME), run.get(_FROM)
    if mode != "resume_path":
        if path is not None and mode in ("auto", "disable"):
            sets = {_RESUME: "resume_path"}
            yield run.problem(_FROM, f"verl does not read this key with {_RESUME}={mode}.", "", sets, (), "NOTE")
        return
    if not isinstance(path, str) or re.search(r"global_step_(\d+)/?$", path) is None:
        reason = "with resume_mode=resume_path, verl requires the path of a folder named global_step_N."
        yield run.problem(_FROM, reason, f"Set {_FROM}=.../global_step_N, the intended checkpoint.", (), ())
    elif _is_local(run, path) and not Path(path).is_dir():
        reason = f"there is no such folder{'' if os.path.isabs(path) else f' in {os.getcwd()}'}."
        yield run.problem(_FROM, reason, "Set it to the intended checkpoint.", (), ())


def check_folders(run: Composed) -> Iterator[Problem]:
    """Check that the folders of the run are writable."""
    folders = {key: run.get(key) for key in _FOLDERS if run.get(key) is not None or key == _FOLDERS[0]}
    if (application := HydraConfig.instance().cfg) is not None:
        key = "hydra.run.dir"
        try:
            folders[key] = OmegaConf.select(cast(DictConfig, application), key)
        except OmegaConfBaseException as error:
            yield run.problem(key, f"{str(error).splitlines()[0]}.", "Set it to a folder.", (), (), value="")
    for key, value in folders.items():
        if not isinstance(value, str) or not value.strip():
            yield run.problem(key, "not a folder.", f"Set {key}=PATH.", (), (), value=value)
        elif (key not in _FOLDERS or _is_local(run, value)) and (why := _explain_unwritable(value)):
            yield run.problem(key, f"{why}.", "Set a writable folder.", (), (), value=value)


def _is_local(run: Composed, path: str) -> bool:
    """Return True if a path is on this machine: not a URL, and no cluster that may have another file system."""
    address = run.get("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return "://" not in path and address in (None, "", "local")


def _explain_unwritable(path: str) -> str:
    """Explain why a folder cannot be created or written to; "" if it can. The test leaves no files behind."""
    place = Path(path).absolute()
    try:
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            return f"{place} is a file"
        with tempfile.TemporaryDirectory(dir=place):
            return ""
    except (OSError, ValueError) as error:
        return f"{place} cannot be written: {getattr(error, 'strerror', None) or error}"


def check_numbers(run: Composed) -> Iterator[Problem]:
    """Check that numbers fit float32 or an index."""
    plain = flatten(cast(dict[str, Any], OmegaConf.to_container(run.config, resolve=False)))
    for key, value in ((key, value) for key, held in plain.items() for value in _list_values(held)):
        if isinstance(value, float) and math.isfinite(value) and abs(value) > _LARGEST:
            reason = f"products with it overflow float32; numbers above {_LARGEST:g} are rejected."
            yield run.problem(key, reason, "Set a smaller number.", (), (), value=value)
        elif isinstance(value, int) and abs(value) >= 2**63:
            shown = f"{str(value)[:20]}..."
            yield run.problem(key, "the number exceeds 64 bits.", "Set a smaller number.", (), (), value=shown)


def _list_values(value: Any) -> Iterator[Any]:
    if not isinstance(value, list):
        yield value
        return
    for each in value:
        yield from _list_values(each)


def check_micro_batches(run: Composed) -> Iterator[Problem]:
    """Check that a rank's mini-batch is a multiple of its fixed micro-batch size, or that both passes are dynamic.

    verl asserts the first condition when it splits a mini-batch (``prepare_micro_batches`` in the engines, ``dp_actor``
    and its workers in 0.7.1), which is after models are loaded and the first batch is sampled. It asserts the second
    condition in ``engine_workers``.
    """
    path, ranks = run.path, count_data_parallel_ranks(run)
    key, dynamic = f"{ROLLOUT}.log_prob_use_dynamic_bsz", bool(run.actor.use_dynamic_bsz)
    if path.worker == "engine" and bool(run.rollout.log_prob_use_dynamic_bsz) != dynamic:
        reason = f"verl's worker asserts that it equals {ACTOR}.use_dynamic_bsz={format_value(dynamic)}."
        yield run.problem(key, reason, "", {key: dynamic}, ())
        return
    if ranks is None or (path.worker == "legacy" and path.strategy == "megatron"):
        return  # the legacy Megatron worker splits unevenly
    size, each = run.actor.ppo_mini_batch_size, run.rollout.n
    rows = size * each
    if rows < ranks or (rows % ranks and path.worker == "engine"):
        step = ranks // math.gcd(ranks, each)
        wanted = max(step, size // step * step)
        reason = f"{size} x {ROLLOUT}.n={each} rows cannot be split evenly over {ranks} data-parallel ranks."
        fix = f"Set {MINI_BATCH}={wanted}, which changes training."
        yield run.problem(MINI_BATCH, reason, fix, {MINI_BATCH: wanted})
        return
    # The legacy FSDP worker asserts this for fixed-size micro-batches, even if dynamic micro-batches are used.
    if path.worker == "legacy" or not run.get(f"{ACTOR}.use_dynamic_bsz"):
        said = f"a mini-batch of {MINI_BATCH} x {ROLLOUT}.n rows leaves {rows // ranks} on each of {ranks} ranks"
        yield from _check_divides(run, f"{ACTOR}.ppo_micro_batch_size_per_gpu", rows // ranks, said)
    if path.worker == "engine":
        yield from _check_forward_passes(run, rows, ranks)


def count_data_parallel_ranks(run: Composed) -> int | None:
    """Count the actor's data-parallel ranks; None if the GPUs cannot be divided evenly into ranks."""
    world, actor = run.config.trainer.nnodes * run.config.trainer.n_gpus_per_node, run.actor
    if actor.strategy == "megatron":
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        each = math.prod(OmegaConf.select(actor, f"megatron.{size}", default=1) for size in sizes)
    else:
        own = OmegaConf.select(actor, "fsdp_config.ulysses_sequence_parallel_size")
        each = max(own or 1, OmegaConf.select(actor, "ulysses_sequence_parallel_size", default=1) or 1)
    ranks, rest = divmod(world, each)
    return ranks if ranks and not rest else None


def _check_forward_passes(run: Composed, mini_batch: int, ranks: int) -> Iterator[Problem]:
    """Check that a rank's share of a batch is a multiple of the micro-batches for pi_old and the reference policy."""
    rows = count_prompts(run.config) * run.rollout.n
    if run.path.trainer == "v1":
        # verl pads a batch to whole mini-batches; in separate_async, each mini-batch is a step.
        several = run.config.trainer.v1.trainer_mode != "separate_async"
        rows = math.ceil(rows / mini_batch) * mini_batch if several else mini_batch
    said = f"a batch of {rows} rows leaves {rows // ranks} on each of {ranks} ranks"
    passes = run.spec.proximal not in WITHOUT_FORWARD and not run.verls.get(BYPASS)
    for section, computed in (
        (ROLLOUT, passes),
        ("actor_rollout_ref.ref", run.actor.use_kl_loss or run.get(KL_IN_REWARD)),
    ):
        if rows % ranks == 0 and computed and not run.get(f"{section}.log_prob_use_dynamic_bsz"):
            yield from _check_divides(run, f"{section}.log_prob_micro_batch_size_per_gpu", rows // ranks, said)


def _check_divides(run: Composed, key: str, rows: int, said: str) -> Iterator[Problem]:
    size = run.get(key)
    # verl itself rejects values of other types.
    if isinstance(size, int) and size > 0 and rows % size:
        fits = max(each for each in range(1, min(size, rows) + 1) if rows % each == 0)
        reason = f"{said}, which is not a multiple of this value: verl would stop at its first update."
        yield run.problem(key, reason, "", {key: fits})


def warn_unlike_micro_batches(run: Composed) -> Iterator[Problem]:
    """Warn if micro-batches for pi_old and pi differ, because kernels then round differently (verl issue 6280)."""
    bypassed = run.spec.proximal in WITHOUT_FORWARD or run.verls.get(BYPASS)
    if bypassed or (run.spec.is_none and not run.active):
        return
    (ours, theirs), sizes = list_micro_batch_keys(run)
    if bool(run.actor.use_dynamic_bsz) == bool(run.rollout.log_prob_use_dynamic_bsz):
        ours, theirs = sizes
    elif run.path.worker == "engine":
        return  # check_micro_batches stops it
    trained, scored, key = run.actor.get(ours), run.rollout.get(theirs), f"{ROLLOUT}.{theirs}"
    if trained is not None and scored is not None and trained != scored:
        reason = (
            f"pi is computed with {ACTOR}.{ours}={format_value(trained)}: kernels may round pi and pi_old differently."
        )
        yield run.problem(key, reason, "", {key: trained}, ("pi_old",), "NOTE")


def check_by_verl(run: Composed) -> Iterator[Problem]:
    """Run verl's ``validate_config`` on a copy and report what verl rejects.

    The critic and LoRA's rank are checked only by the launch itself, because verl loads the model for the first check
    and imports vLLM for the second.
    """
    if run.program == FULLY_ASYNC:
        return  # this program does not call validate_config
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    tried = copy_config(run.config)
    with open_dict(tried):
        for key in _LORA:
            if OmegaConf.select(tried, key):
                OmegaConf.update(tried, key, 0)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config=tried, use_reference_policy=need_reference_policy(tried), use_critic=False)
    except ImportError:
        return  # a package is missing on this machine, which may not be the one that trains
    except Exception as error:  # an error of any type would stop the launch
        cause = error.__cause__ or error
        yield _build_refusal(run, " ".join(str(cause).split()) or type(cause).__name__)


def _build_refusal(run: Composed, said: str) -> Problem:
    """Build the problem for a value that verl rejects, under the key that verl's message names, if it names one."""
    reason, value = f"verl's own validation rejects it: {said.rstrip('.')}.", None
    if found := _INDIVISIBLE.search(said):
        key, divisor, rows, batch = BATCH, int(found[1]), int(run.get(f"{ROLLOUT}.n")), int(run.get(BATCH))
        value = next(size for size in range(batch, batch + divisor + 1) if size * rows % divisor == 0)
    elif _BELOW.search(said):
        key, value = MINI_BATCH, run.get(BATCH)
    elif found := (unset := _UNSET.search(said)) or _BOTH.search(said):
        # verl's message names keys of the actor without their parent section.
        key = f"actor_rollout_ref.{found[1]}" if found[1].startswith("actor.") else found[1]
        value = 1 if unset else None
    else:
        return run.problem("", reason, value=None)
    return run.problem(key, reason, f"Set {set_to(key, value)}.", {key: value})


_LOGGER, _MANAGER = "trainer.logger", "reward.reward_manager"
_BACKENDS = f"{ROLLOUT}.checkpoint_engine.custom_backend_module"
_KL = tuple(f"{name}{sign}" for sign in ("", "+") for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"))
_OWNERS = {"vllm": "vLLM", "torch": "torch.optim"}
"""First part of a module's name -> the owner of the names in that module, if the owner is not verl."""


def _is_uncorrected(run: Composed) -> bool:
    """Return True if the key is checked here; with a correction, that correction's checks report more about it."""
    return run.spec.is_none


def _is_vllm(run: Composed) -> bool:
    return run.get(NAME) == "vllm"


def _is_plain_vllm(run: Composed) -> bool:
    """Return True if no plugin of vLLM may register further names."""
    return _is_vllm(run) and all(each.value.startswith("vllm.") for each in entry_points(group="vllm.general_plugins"))


@dataclass(frozen=True)
class Choice:
    """The names that a key of verl accepts.

    Attributes:
        names: the names known here.
        module: if ``names`` is empty, the module (or package, as ``NAME.*``) whose source contains the names; if it
            contains none either, the key is not checked.
        within: pattern of the parts of the source that contain the names.
        name: pattern of a single name in such a part.
        read: returns whether a run reads the key.
        extensible: whether the user's own code may register further names.
        null: whether null is allowed.
    """

    names: tuple[str, ...] = ()
    module: str = ""
    within: str = ""
    name: str = r'"([\w-]+)"'
    read: Callable[[Composed], bool] = lambda run: True
    extensible: bool = False
    null: bool = False

    def list_names(self) -> tuple[str, ...]:
        """List the names that the installed release has."""
        return self.names or _read_names(self.module, self.within, self.name)

    def rejects(self, value: Any) -> bool:
        """Return True if the value is not one of the names; False if the names or the key (``...``) are unknown."""
        names = self.list_names()
        return value is not ... and bool(names) and str(value) not in names and not (value is None and self.null)


@functools.cache
def _read_names(module: str, within: str, name: str) -> tuple[str, ...]:
    source = find_source(module.removesuffix(".*"))
    if source is None:
        return ()
    files = sorted(source.parent.rglob("*.py")) if module.endswith(".*") else [source]
    parts = (part for file in files for part in re.findall(within, file.read_text(encoding="utf-8"), re.S))
    return tuple(dict.fromkeys(found for part in parts for found in re.findall(name, part)))


def _read_from(module: str, within: str, name: str = Choice.name, **more: Any) -> Choice:
    return Choice((), module, within, name, **more)


_CORE, _CONFIGS = "verl.trainer.ppo.core_algos", "verl.workers.config"
_DTYPE = _read_from("verl.utils.torch_dtypes", r"_LIST = \[(.*?)\]")
_LOGGERS = _read_from("verl.utils.tracking", r"supported_backend = \[(.*?)\]")
_ENGINES = r'EngineRegistry\.register\([^)]*?backend=(\[.*?\]|"\w+")'
CHOICES: dict[str, Choice] = {
    "trainer.resume_mode": Choice(("auto", "disable", "resume_path")),
    "data.truncation": Choice(("error", "left", "right", "middle")),
    ESTIMATOR: _read_from(_CORE, r"class AdvantageEstimator\(.*?\n\n\n", r' = "(\w+)"', extensible=True),
    "algorithm.kl_penalty": Choice(_KL),
    "algorithm.kl_ctrl.type": Choice(("fixed", "adaptive")),
    f"{VERL}.rollout_is": Choice(("token", "sequence"), read=_is_uncorrected, null=True),
    f"{ACTOR}.kl_loss_type": Choice(_KL),
    LOSS_MODE: _read_from(_CORE, r'@register_policy_loss\(\s*"\w+"', read=_is_uncorrected, extensible=True),
    f"{ACTOR}.loss_agg_mode": _read_from(
        f"{_CONFIGS}.actor", r"valid_loss_agg_modes = \[(.*?)\]", read=_is_uncorrected
    ),
    f"{ACTOR}.strategy": _read_from("verl.workers.engine.*", _ENGINES, read=_is_uncorrected),
    f"{ACTOR}.optim.lr_scheduler_type": Choice(("constant", "cosine"), read=_is_uncorrected),
    f"{ACTOR}.optim.optimizer": _read_from(
        *("torch.optim", r"__all__ = \[(.*?)\]", r'"([A-Z]\w*)"'),
        read=lambda run: run.get(f"{ACTOR}.optim.optimizer_impl") == "torch.optim",
    ),
    f"{FSDP}.router_replay.mode": Choice(("disabled", "R2", "R3"), read=_is_uncorrected),
    f"{FSDP}.dtype": _DTYPE,
    f"{FSDP}.model_dtype": replace(_DTYPE, null=True),
    f"{MEGATRON}.dtype": _read_from(f"{_CONFIGS}.engine", r"self\.dtype in \[(.*?)\]"),
    NAME: _read_from(
        "verl.workers.rollout.replica", r'Registry\.register\("\w+"', read=_is_uncorrected, extensible=True
    ),
    f"{ROLLOUT}.mode": _read_from(f"{_CONFIGS}.rollout", r'self\.mode != "\w+"'),
    f"{ROLLOUT}.dtype": _read_from("vllm.config.model", r"\nModelDType = Literal\[(.*?)\]", read=_is_vllm),
    f"{ROLLOUT}.load_format": _read_from(
        "vllm.model_executor.model_loader", r"\nLoadFormats = Literal\[(.*?)\]", read=_is_plain_vllm, extensible=True
    ),
    BACKEND: _read_from(
        *("verl.checkpoint_engine.*", r'EngineRegistry\.register\("[\w-]+"\)'),
        read=lambda run: not run.get(_BACKENDS),
        extensible=True,
    ),
    MODE: _read_from(
        *("verl.trainer.ppo.v1.*", r'@register_trainer\("\w+"\)'),
        read=lambda run: run.spec.is_none and bool(run.get(USE_V1)),
        extensible=True,
    ),
    f"{_MANAGER}.name": _read_from(
        *("verl.experimental.reward_loop.reward_manager.*", r'@register\("\w+"\)'),
        read=lambda run: run.get(f"{_MANAGER}.source") == "register",
        extensible=True,
    ),
}
"""Keys that decide what is trained -> the names that they accept."""


def check_choices(run: Composed) -> Iterator[Problem]:
    """Check keys that accept only certain names, and the names of loggers."""
    for key, choice in CHOICES.items():
        value, names = run.get(key, ...), choice.list_names()
        # find_unreadable_values reports an estimator that is not a name.
        if not choice.rejects(value) or not choice.read(run) or (key == ESTIMATOR and not isinstance(value, str)):
            continue
        reason = f"{_OWNERS.get(choice.module.partition('.')[0], 'verl')} has no such choice"
        if choice.extensible and run.registrar:
            reason = f"{reason}; {run.registrar} may register it, but this is not checked."
            yield run.problem(key, reason, "", (), (), "NOTE")
            continue
        near = find_closest(value, names, 0.7) if isinstance(value, str) else None
        sets = {key: near} if near else {}  # any other choice would be a different algorithm
        yield run.problem(key, f"{reason}.", f"Set one of {', '.join(names)}.", sets, ())
    known, given = (*_LOGGERS.list_names(), "tracking"), run.get(_LOGGER)
    loggers: list[Any] = list(given) if isinstance(given, ListConfig) else [] if given is None else [given]
    if wrong := [name for name in loggers if name not in known]:
        fixed = [find_closest(str(name), known) or "console" for name in loggers]
        reason, fix = f"verl has no logger {', '.join(map(str, wrong))}.", f"Set one or more of {', '.join(known)}."
        yield run.problem(_LOGGER, reason, fix, {_LOGGER: list(dict.fromkeys(fixed))}, (), value=loggers)
