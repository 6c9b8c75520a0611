"""Detection of overrides whose keys are not in the composed configuration, with replacements for old keys."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_patches.releases import TESTED

from ..correction import Problem
from ..correction.problem import find_closest
from ..preflight.checks.verl_correction import FREE, OBSOLETE, find_meant
from ..preflight.own_keys import TARGET, explain_misplaced, list_fields, list_groups, list_sections

_REWARD_MODEL = (
    *("forward_max_token_len_per_gpu", "launch_reward_fn_async", "load_weight", "max_length", "megatron"),
    *("micro_batch_size*", "model.fsdp_config", "model.input_tokenizer", "model.use_*", "nccl_timeout", "profiler"),
    *("sandbox_fusion", "strategy", "ulysses_sequence_parallel_size", "use_*"),
)
_ROLLOUT = "actor_rollout_ref.rollout"
LAST = {
    "0.9.0": ("*.megatron.grad_offload", "data.continuous_token"),
    "0.8.0": ("actor_rollout_ref.*.load_weight", "critic.load_weight", f"{_ROLLOUT}.skip"),
    "0.7.1": (
        *("critic.model.fsdp_config", "data.datagen", "data.sampler", "trainer.use_legacy_worker_impl"),
        *(f"{_ROLLOUT}.{name}" for name in ("layer_name_map", "multi_turn.interaction_config_path")),
        *(f"{_ROLLOUT}.{name}" for name in ("skip_rollout", "skip_dump_dir")),
    ),
    "0.7.0": (
        *(f"reward_model.{name}" for name in _REWARD_MODEL),
        *("algorithm.rollout_correction.rollout_rs_threshold_lower", "reward_manager"),
        *("algorithm.rollout_correction.rollout_token_veto_threshold", f"{_ROLLOUT}.update_weights_bucket_megabytes"),
        "async_training.use_rollout_log_probs",
    ),
    "0.5.0": (
        *("actor_rollout_ref.*.profile", "ray_init", "trainer.*_nsight_options", "trainer.npu_profile"),
        *("trainer.profile_steps", f"{_ROLLOUT}.multi_turn.completion_callback"),
    ),
    "0.4.1": ("*.gradient_checkpointing_kwargs", "critic.kl_ctrl", f"{_ROLLOUT}.use_fire_sampling"),
    "0.4.0": ("*.checkpoint.contents", f"{_ROLLOUT}.chat_scheduler", f"{_ROLLOUT}.multi_turn.max_turns"),
    "0.3.0": ("actor_rollout_ref.ref.param_offload", "trainer.val_generations_to_log_to_wandb"),
    "0.2.0": (
        *("*.fsdp_config.grad_offload", "*.num_layers_per_virtual_pipeline_stage"),
        "trainer.remove_previous_ckpt_in_save",
    ),
}
"""Release -> patterns for keys or sections that no later release has."""

_CRITIC = "critic.model.fsdp_config."


def find_last_release(key: str) -> str | None:
    """Return the last release of verl that had a key; None if it is unknown."""
    for release, patterns in LAST.items():
        if any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in patterns):
            return release
    return None


def find_successor(key: str, value: str, last: str) -> str:
    """Explain how to replace an override of a key that was removed after release ``last``."""
    if key.endswith(".grad_offload"):
        return "Delete this override: param_offload frees the gradients' memory too."
    if key == "trainer.use_legacy_worker_impl":
        return "Delete this override: verl now has only engine workers, which `disable` selects."
    if key == "async_training.use_rollout_log_probs" and value.lower() == "true":
        return (
            "Write algorithm.rollout_correction.bypass_mode=True; with a correction, write correction.proximal=bypass."
        )
    if key.startswith(_CRITIC):
        return f"Write critic.fsdp.{key.removeprefix(_CRITIC)}={value}."
    if value in ("null", "None"):
        return "Delete this override: null has no effect."
    if instead := OBSOLETE.get(key.rpartition(".")[2]):
        return f"Instead: {instead}."
    return f"Launch with verl {last}." if last in TESTED else f"The program was written for verl {last} or older."


_OPEN = ("correction.masks", "correction.weights", "offpolicy.extensions")
"""Sections of this package in which the user chooses the names."""
# One name, or several names in a section, without a sign, so that the override neither adds nor deletes a key.
_PLAIN = re.compile(r"(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)*)\s*=(?P<value>.*)", re.S)
_ADDED = re.compile(r"\+[A-Za-z_]\w*(\.[\w-]+)+\s*=")
_CLOSE = 0.85
_MODELS = {"actor_rollout_ref", "critic"}
_ENGINE, _MEGATRON = "model_engine", "megatron"

Compose = Callable[[list[str]], DictConfig]
"""Composes the configuration with the given overrides."""


def find_unknown_keys(compose: Compose, overrides: Sequence[str], owner: str, *, verls: bool = True) -> list[Problem]:
    """Find the overrides whose keys the configuration does not have.

    Args:
        compose: composes the same program with other overrides.
        overrides: overrides with which the configuration cannot be composed.
        owner: name of the configuration's owner, such as "verl 0.9.1".
        verls: whether the program belongs to the installed verl, or was written for it, as this package's program was.
    """
    plain = [found for each in overrides if (found := _PLAIN.fullmatch(each)) and not each.startswith("hydra.")]
    if not plain:
        return []
    # A + on an existing key also fails, and must not hide the unknown keys; ++ works for existing and new keys.
    written = [found[0] for found in plain]
    others = [f"+{each}" if _ADDED.match(each) else each for each in overrides if each not in written]
    try:
        config = compose(others)
        # Chosen options add keys, as model_engine=megatron does.
        if chosen := [found[0] for found in plain if _is_group(config, found["key"])]:
            config = compose([*chosen, *others])
    except (HydraException, OmegaConfBaseException):
        return []
    return [problem for found in plain for problem in _check_key(config, found["key"], found["value"], owner, verls)]


def _check_key(config: DictConfig, key: str, value: str, owner: str, verls: bool) -> Iterator[Problem]:
    names = key.split(".")
    ours = len(names) > 1 and names[0] in list_sections() and "correction" in config
    if ours and OmegaConf.select(config, names[0]) is None:
        options = " or ".join(f"{names[0]}={option}" for option in list_groups().get(names[0], ()))
        yield Problem("", None, f"{key}={value}: {names[0]} is off, so the key would be unused.", f"Add {options}.")
        return
    node: object = config
    for depth, name in enumerate(names):
        if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
            return
        if name not in list(node):  # "in" ignores mandatory values that are not given yet
            if len(names) == 1 and _is_group(config, name):
                return
            yield _explain(config, node, names, depth, value, owner, verls)
            return
        node = node._get_node(name)


def _is_group(config: DictConfig, name: str) -> bool:
    return name in (OmegaConf.select(config, "hydra.runtime.choices") or ())


def _explain(
    config: DictConfig, section: DictConfig, names: Sequence[str], depth: int, value: str, owner: str, verls: bool
) -> Problem:
    key = ".".join(names)
    if names[0] in list_sections() and depth:
        near = find_closest(names[depth], map(str, section))
        known = f"Known: {', '.join(map(str, section))}."
        if ".".join(names[:depth]) in _OPEN:
            known = f"Write {shlex.quote(f'+{key}={value}')}, which adds the key."
        fix = f"Did you mean {'.'.join([*names[:depth], near])}?" if near else known
        return Problem("", None, f"{key}={value}: unknown key.", fix)
    if verls and (meant := find_meant(names)) is not None:
        return Problem("", None, f"{key}={value}: {owner} has no such key.", f"Did you mean {meant}={value}?")
    looks = verls and "correction" in config and not _waits_for_megatron(config, section, names, depth)
    ours = explain_misplaced("", key, value, config) if looks else None
    if ours is not None:
        return dataclasses.replace(ours, verdict="ERROR")
    reason, fix = _find_reason(config, section, names, depth, value, owner, verls)
    return Problem("", None, f"{key}={value}: {reason}", fix)


def _waits_for_megatron(config: DictConfig, section: DictConfig, names: Sequence[str], depth: int) -> bool:
    """Return True if the key belongs to an engine other than the chosen one."""
    of_megatron = names[depth] == _MEGATRON or (_MEGATRON in names and TARGET not in section)
    return of_megatron and _ENGINE in config and config[_ENGINE] != _MEGATRON


def _find_reason(
    config: DictConfig, section: DictConfig, names: Sequence[str], depth: int, value: str, owner: str, verls: bool
) -> tuple[str, str]:
    """Find out why a key is missing and how to fix it; there is no fix if no override has the requested effect."""
    key, missing = ".".join(names), f"{owner} has no such key."
    if _waits_for_megatron(config, section, names, depth):
        return missing, f"Set {_ENGINE}={_MEGATRON}, which adds the key."
    if (depth and not len(section)) or any(map(FREE.search, names[:depth])):
        return missing, f"Write +{key}: any key can be added there."
    if depth == len(names) - 1 and names[-1] in (list_fields(section) or ()):
        reason = f"{owner}'s YAML omits this field of {section[TARGET].rpartition('.')[2]}."
        return reason, f"Write +{key}={value}."
    if last_release := find_last_release(key):
        reason = f"{missing[:-1]}: verl {last_release} was the last release with this key."
        return reason, find_successor(key, value, last_release)
    last = depth == len(names) - 1
    sections = [str(each) for each in section if isinstance(section._get_node(each), DictConfig)]
    near = find_closest(names[depth], (str(each) for each in section if not last or each not in sections), _CLOSE)
    places = [place for place in _find_places(config, names[-1]) if _is_likely(place, names, depth)][:1]
    places += [".".join([*names[:depth], near, *names[depth + 1 :]])] if near else []
    fix = f"Set {places[0]} if that is what you mean." if places else ""
    if not verls:
        return missing, f"{fix} Otherwise install the verl release that the program was written for.".strip()
    # verl turns a section that names a dataclass into that dataclass, which accepts no further keys.
    refused = "verl rejects it even with a +" if section.get(TARGET) else "verl ignores it even with a +"
    return f"{missing[:-1]}, and {refused}: it would have no effect.", fix


def _is_likely(place: str, names: Sequence[str], depth: int) -> bool:
    """Return True if a key of the same name may be meant: the name is specific, or the section is the same.

    An override for the actor or the rollout never means a key of the critic. If the name's own model has a section
    (``depth`` > 0), the other key must be in that section, or above all models.
    """
    found, owner = place.split("."), 2 if names[0] == "actor_rollout_ref" else 1
    if depth and len(found) > 1 and {found[0], names[0]} & _MODELS and found[:owner] != list(names[:owner]):
        return False
    return len(names) == 1 or "_" in names[-1] or bool(find_closest(names[-2], found[-2:-1], _CLOSE))


def _find_places(node: DictConfig, name: str, path: str = "") -> Iterator[str]:
    """List the keys with this name; keys closer to the top level come first."""
    below = {str(each): node._get_node(each) for each in node}
    if name in below:
        yield f"{path}{name}"
    for each, inner in below.items():
        if each != "hydra" and isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_interpolation():
            yield from _find_places(inner, name, f"{path}{each}.")
