"""Checks of verl's base loss, by a probe on a small batch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

from hydra.utils import get_class
from omegaconf import MISSING, DictConfig, OmegaConf

from ...correction.problem import EVERYTHING, Problem, find_closest, remove, set_to
from ..composed import ACTOR, BYPASS, LOSS_MODE, Composed, copy_config, name_part

logger = logging.getLogger("verl.offpolicy")

_DEMANDED = "ppo_micro_batch_size_per_gpu"
_AGGREGATION, _SCALE = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
_SECTION = re.compile(r"full_key: ([\w.]+)")
"""Matches the section that verl failed to instantiate, at the end of Hydra's message."""


def check_base_loss(run: Composed) -> Iterator[Problem]:
    """Check that the base loss applies this package's weights."""
    if not run.spec.is_none:
        yield from _probe(run, EVERYTHING)


def check_base_loss_of_verl(run: Composed) -> Iterator[Problem]:
    """Check that the base loss applies the weights of verl's own correction."""
    if run.spec.is_none and "rollout_is" in run.active and BYPASS not in run.active:
        # verl's own correction need not be independent of how a mini-batch is split.
        yield from _probe(run, (name_part("rollout_is"),), split=False)


def _probe(run: Composed, parts: tuple[str, ...], *, split: bool = True) -> Iterator[Problem]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass

    from ..base_loss_probe import probe

    actor = run.actor
    try:
        actor_config: Any = omega_conf_to_dataclass(actor)
    except Exception as error:
        cause = error.__cause__ or error
        section = _SECTION.search(str(error))
        unknown = _find_unknown_keys(run, section[1], parts) if section else None
        yield unknown or _build_refusal(run, str(cause) or type(cause).__name__, parts)
        return
    if run.registrar and actor.policy_loss.loss_mode not in POLICY_LOSS_REGISTRY:
        reason = (
            f"verl has no such loss; {run.registrar} may register it, but this is not checked. The first update proves "
            f"the loss."
        )
        yield run.problem(LOSS_MODE, reason, "", (), parts, "NOTE")
        return
    try:
        wrong = probe(actor_config, split=split)
    except Exception as error:
        wrong = f"it fails on a small batch: {error}"
    if not wrong:
        return
    fix = (
        f"No override corrects {actor.policy_loss.loss_mode}. A loss_mode that weighs each token's policy "
        f"term (vanilla, gspo, cispo, gpg, dppo_tv, sapo) trains another objective."
    )
    sets: dict[str, Any] = {}
    misspelt = actor.policy_loss.loss_mode not in POLICY_LOSS_REGISTRY
    if misspelt and (near := find_closest(str(actor.policy_loss.loss_mode), POLICY_LOSS_REGISTRY)):
        fix, sets = f"Did you mean {near}?", {LOSS_MODE: near}
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        fix = f"Set {_SCALE} to a constant, such as data.max_response_length."
        sets = {_SCALE: run.config.data.max_response_length}
    yield run.problem(LOSS_MODE, f"{wrong}.", fix, sets, parts, alongside=(_AGGREGATION,))


def _find_unknown_keys(run: Composed, section: str, parts: tuple[str, ...]) -> Problem | None:
    """Find all keys of a section that its verl dataclass does not have; None if there are none.

    If another section of the actor has a key of this name, the fix moves the key there, so that its value is not lost.
    """
    node = run.get(section)
    target: Any = node.get("_target_") if isinstance(node, DictConfig) else None
    known = {field.name for field in dataclasses.fields(get_class(target))} if target else set()
    extra = [str(name) for name in node if name not in known and name != "_target_"] if target else []
    if not extra:
        return None
    overrides: list[str] = []
    sentences: list[str] = []
    for name in extra:
        key, value = f"{section}.{name}", node[name]
        if instead := next((place for place in _find_keys(run, name) if place != key), None):
            overrides += [*remove(key, value), set_to(instead, value)]
            sentences.append(f"Set {instead} instead of {key}.")
        elif name == "grad_offload":  # a key of verl up to 0.9.0
            overrides += remove(key, value)
            sentences.append("Delete it: param_offload frees the gradients' memory too.")
        else:
            sentences.append(f"{key} would have no effect.")
    reason = f"verl has no such key there: {target.rpartition('.')[2]} does not accept {', '.join(extra)}."
    return run.problem(f"{section}.{extra[0]}", reason, " ".join(sentences), overrides, parts)


def _build_refusal(run: Composed, said: str, parts: tuple[str, ...]) -> Problem:
    """Build the problem for an actor that verl's dataclasses refuse, under the key that the message names, if any."""
    reason = f"verl rejects it: {' '.join(said.split()).rstrip('.?')}."
    named = [key for word in re.findall(r"\w+_\w+", said) if (key := next(_find_keys(run, word), None)) is not None]
    name = next((key for key in named if key.endswith(_DEMANDED)), named[0] if named else "")
    if name.endswith(_DEMANDED):
        whole = f"{ACTOR}.ppo_micro_batch_size"
        override = set_to(whole, None) if run.get(whole) is not None else set_to(f"{ACTOR}.{_DEMANDED}", 1)
    elif (default := _find_default_that_works(run.config, name)) is not None:
        name, usual = default
        choices = _list_choices(run.get(name.rpartition(".")[0])._target_, usual)
        if choices:  # the default is a different algorithm from the misspelled choice
            near = find_closest(str(run.get(name)), choices)
            return run.problem(name, reason, f"Set one of {', '.join(choices)}.", {name: near} if near else (), parts)
        if isinstance(usual, bool):  # the default would switch off the requested feature
            return run.problem(name, reason, "Change it, or the key that verl's message is about.", (), parts)
        override = set_to(name, usual)
    elif name:
        return run.problem(name, reason, f"Set {name} to a value that verl accepts.", (), parts)
    else:
        fix = f"Change the key of {ACTOR} that verl's message is about."
        return run.problem("", f"{ACTOR}: {reason}", fix, (), parts, value=None)
    return run.problem(name, reason, f"Set {override}.", (override,), parts)


def _list_choices(target: str, usual: Any) -> list[str]:
    """List the choices, including ``usual``, with which the code of a verl dataclass compares a value."""
    for owner in get_class(target).__mro__ if isinstance(usual, str) else ():
        for node in ast.walk(ast.parse(inspect.getsource(owner))) if owner.__module__.startswith("verl.") else ():
            words = (
                [each.value for each in node.elts if isinstance(each, ast.Constant)]
                if isinstance(node, ast.List)
                else []
            )
            if usual in words:
                return [str(word) for word in words]
    return []


def _find_default_that_works(config: DictConfig, name: str) -> tuple[str, Any] | None:
    """Find a key whose default makes verl accept the actor, trying the named key first; return it and the default."""
    from verl.utils.config import omega_conf_to_dataclass

    # The key that verl's message names is the likeliest cause.
    for key, default in sorted(_list_defaults(config), key=lambda each: each[0] != name):
        if OmegaConf.select(config, key) == default:
            continue
        changed = copy_config(config)
        OmegaConf.update(changed, key, default, merge=False)
        try:
            omega_conf_to_dataclass(changed.actor_rollout_ref.actor)
        except Exception as error:  # of any type: this key is not the cause
            logger.debug("%s=%s: %s", key, default, error)
            continue
        return key, default
    return None


def _list_defaults(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """List keys of the actor and its sections, with their defaults in verl's dataclasses if these are plain values."""
    for path, node in _list_sections(config.actor_rollout_ref.actor, ACTOR):
        target = node.get("_target_")
        for field in dataclasses.fields(get_class(target)) if target else ():
            plain = field.default is None or isinstance(field.default, bool | int | float | str)
            if field.name in node and plain and field.default != MISSING:
                yield f"{path}.{field.name}", field.default


def _find_keys(run: Composed, name: str) -> Iterator[str]:
    """List the keys with this name in the actor and its sections."""
    return (f"{path}.{name}" for path, node in _list_sections(run.actor, ACTOR) if name in node)


def _list_sections(node: DictConfig, path: str) -> Iterator[tuple[str, DictConfig]]:
    """List a section and all sections below it, with their paths."""
    yield path, node
    for name in map(str, node):
        if isinstance(below := OmegaConf.select(node, name), DictConfig):
            yield from _list_sections(below, f"{path}.{name}")
