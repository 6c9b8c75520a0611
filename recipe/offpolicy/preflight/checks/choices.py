"""Check of verl's keys that accept one of a fixed set of names; the names are read from the installed source."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

from omegaconf import ListConfig

from verl_patches.execution_path import USE_V1

from ...correction.problem import Problem, find_closest
from ..composed import ACTOR, BACKEND, ESTIMATOR, FSDP, LOSS_MODE, MEGATRON, MODE, NAME, ROLLOUT, VERL, Composed
from ..python_source import find_source

_LOGGER, _MANAGER = "trainer.logger", "reward.reward_manager"
_BACKENDS = f"{ROLLOUT}.checkpoint_engine.custom_backend_module"
_KL = tuple(f"{name}{sign}" for sign in ("", "+") for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"))


_OWNERS = {"vllm": "vLLM", "torch": "torch.optim"}
"""First part of a module's name -> the owner of the names in that module, if the owner is not verl."""


def _is_vllm(run: Composed) -> bool:
    return run.get(NAME) == "vllm"


def _is_uncorrected(run: Composed) -> bool:
    """Return True if the key is checked here; with a correction, that correction's checks report more about it."""
    return run.spec.is_none


def _find_registrar(run: Composed) -> str:
    return run.registrar


def _find_plugins(run: Composed) -> str:
    plugins = (each for each in entry_points(group="vllm.general_plugins") if not each.value.startswith("vllm."))
    return run.registrar or ", ".join(f"vLLM's plugin {each.name}" for each in plugins)


@dataclass(frozen=True)
class Choice:
    """The names that a key of verl accepts.

    Attributes:
        names: the names known here, the default first.
        module: if ``names`` is empty, the module (or package, as ``NAME.*``) whose source contains the names; if it
            contains none either, the key is not checked.
        within: pattern of the parts of the source that contain the names.
        name: pattern of a single name in such a part.
        read: returns whether a run reads the key.
        find_registrar: returns the code that may register further names, usually the user's; "" if there is none.
        null: whether null is allowed.
        default: the name to propose for a value that resembles no name.
    """

    names: tuple[str, ...] = ()
    module: str = ""
    within: str = ""
    name: str = r'"([\w-]+)"'
    read: Callable[[Composed], bool] = lambda run: True
    find_registrar: Callable[[Composed], str] = lambda run: ""
    null: bool = False
    default: str | None = None

    def list_names(self) -> tuple[str, ...]:
        """List the names that the installed release has."""
        return self.names or _read_names(self.module, self.within, self.name)


@functools.cache
def _read_names(module: str, within: str, name: str) -> tuple[str, ...]:
    source = find_source(module.removesuffix(".*"))
    if source is None:
        return ()
    files = sorted(source.parent.rglob("*.py")) if module.endswith(".*") else [source]
    parts = (part for file in files for part in re.findall(within, file.read_text(encoding="utf-8"), re.S))
    return tuple(dict.fromkeys(found for part in parts for found in re.findall(name, part)))


_CORE, _CONFIGS = "verl.trainer.ppo.core_algos", "verl.workers.config"
_DTYPE = Choice(module="verl.utils.torch_dtypes", within=r"_LIST = \[(.*?)\]")
_LOGGERS = Choice(module="verl.utils.tracking", within=r"supported_backend = \[(.*?)\]")
CHOICES: dict[str, Choice] = {
    "trainer.resume_mode": Choice(("auto", "disable", "resume_path"), default="auto"),
    "data.truncation": Choice(("error", "left", "right", "middle")),
    ESTIMATOR: Choice((), _CORE, r"class AdvantageEstimator\(.*?\n\n\n", r' = "(\w+)"', find_registrar=_find_registrar),
    "algorithm.kl_penalty": Choice(_KL),
    "algorithm.kl_ctrl.type": Choice(("fixed", "adaptive")),
    f"{VERL}.rollout_is": Choice(("token", "sequence"), read=_is_uncorrected, null=True),
    f"{ACTOR}.kl_loss_type": Choice(_KL),
    LOSS_MODE: Choice(
        (), _CORE, r'@register_policy_loss\(\s*"\w+"', read=_is_uncorrected, find_registrar=_find_registrar
    ),
    f"{ACTOR}.loss_agg_mode": Choice(
        (), f"{_CONFIGS}.actor", r"valid_loss_agg_modes = \[(.*?)\]", read=_is_uncorrected
    ),
    f"{ACTOR}.strategy": Choice(
        (), "verl.workers.engine.*", r'EngineRegistry\.register\([^)]*?backend=(\[.*?\]|"\w+")', read=_is_uncorrected
    ),
    f"{ACTOR}.optim.lr_scheduler_type": Choice(("constant", "cosine"), read=_is_uncorrected),
    f"{ACTOR}.optim.optimizer": Choice(
        *((), "torch.optim", r"__all__ = \[(.*?)\]", r'"([A-Z]\w*)"'),
        read=lambda run: run.get(f"{ACTOR}.optim.optimizer_impl") == "torch.optim",
    ),
    f"{FSDP}.dtype": _DTYPE,
    f"{FSDP}.model_dtype": replace(_DTYPE, null=True),
    f"{MEGATRON}.dtype": Choice((), f"{_CONFIGS}.engine", r"self\.dtype in \[(.*?)\]"),
    NAME: Choice(
        *((), "verl.workers.rollout.replica", r'Registry\.register\("\w+"'),
        read=_is_uncorrected,
        find_registrar=_find_registrar,
    ),
    f"{ROLLOUT}.mode": Choice((), f"{_CONFIGS}.rollout", r'self\.mode != "\w+"'),
    f"{ROLLOUT}.dtype": Choice((), "vllm.config.model", r"\nModelDType = Literal\[(.*?)\]", read=_is_vllm),
    f"{ROLLOUT}.load_format": Choice(
        *((), "vllm.model_executor.model_loader", r"\nLoadFormats = Literal\[(.*?)\]"),
        read=_is_vllm,
        find_registrar=_find_plugins,
    ),
    BACKEND: Choice(
        *((), "verl.checkpoint_engine.*", r'EngineRegistry\.register\("[\w-]+"\)'),
        read=lambda run: not str(run.get(_BACKENDS)).startswith("verl_patches."),
        find_registrar=lambda run: run.registrar or run.get(_BACKENDS) or "",
    ),
    MODE: Choice(
        *((), "verl.trainer.ppo.v1.*", r'@register_trainer\("\w+"\)'),
        read=lambda run: run.spec.is_none and bool(run.get(USE_V1)),
        find_registrar=_find_registrar,
    ),
    f"{_MANAGER}.name": Choice(
        *((), "verl.experimental.reward_loop.reward_manager.*", r'@register\("\w+"\)'),
        read=lambda run: run.get(f"{_MANAGER}.source") == "register",
        find_registrar=_find_registrar,
    ),
}
"""Keys that decide what is trained -> the names that they accept."""


def check_choices(run: Composed) -> Iterator[Problem]:
    """Check keys with a fixed set of names, and the names of loggers."""
    for key, choice in CHOICES.items():
        value, names = run.get(key, ...), choice.list_names()
        if value is ... or str(value) in names or not names or (value is None and choice.null) or not choice.read(run):
            continue
        if key == ESTIMATOR and not isinstance(value, str):  # find_unreadable_values reports it
            continue
        owner = _OWNERS.get(choice.module.partition(".")[0], "verl")
        if registrar := choice.find_registrar(run):
            reason = f"{owner} has no such choice; {registrar} may register it, but this is not checked."
            yield run.problem(key, reason, "", (), (), "NOTE")
            continue
        near = (find_closest(value, names, 0.7) if isinstance(value, str) else None) or choice.default
        sets = {key: near} if near else {}  # any other choice would be a different algorithm
        yield run.problem(key, f"{owner} has no such choice.", f"Set one of {', '.join(names)}.", sets, ())
    known, given = _LOGGERS.list_names(), run.get(_LOGGER)
    known = (*known, "tracking") if known else ()
    loggers: list[Any] = list(given) if isinstance(given, ListConfig) else [] if given is None else [given]
    if known and (wrong := [name for name in loggers if name not in known]):
        fixed = [(difflib.get_close_matches(str(name), known, 1) or ["console"])[0] for name in loggers]
        reason, fix = f"verl has no logger {', '.join(map(str, wrong))}.", f"Set one or more of {', '.join(known)}."
        yield run.problem(_LOGGER, reason, fix, {_LOGGER: list(dict.fromkeys(fixed))}, (), value=loggers)
