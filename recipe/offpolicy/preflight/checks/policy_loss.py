"""Checks of the loss around the correction: KL, denominator, baseline, distillation, and the base loss."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from typing import Any

from hydra.utils import get_class
from omegaconf import MISSING, DictConfig, OmegaConf

from verl_patches.contract import demand_release, installed_release
from verl_patches.releases import attributes_of

from ...correction import CorrectionSpec
from ...correction.baseline import GROUP_ESTIMATORS
from ...correction.denominator import HAS_DENOMINATOR
from ...correction.problem import EVERYTHING, Problem, remove, set_to
from ..verl_keys.keys import BYPASS, LOSS_MODE, list_active, name_part
from .config_reader import ACTOR, copy_config

logger = logging.getLogger("verl.offpolicy")

_KL_TYPE = f"{ACTOR}.kl_loss_type"
_BASELINE = "correction.baseline"
_UNBIASED = ("low_var_kl", "k3", "kl", "k1")
"""verl's ``kl_loss_type`` whose expectation over pi is KL(pi, pi_ref)."""
_DEMANDED = "ppo_micro_batch_size_per_gpu"
_SECTION = re.compile(r"full_key: ([\w.]+)")
"""The section that verl failed to instantiate, at the end of Hydra's message."""


def check_kl_clip(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that the clipped KL loss exists and has a coefficient and a gradient."""
    if spec.kl_clip is None:
        return
    missing = "there is no KL loss to clip."
    found = _find_no_kl_loss(config, "kl_clip", spec.to_mapping()["kl_clip"], missing, "clipped")
    if found is not None:
        yield found
    elif (kind := config.actor_rollout_ref.actor.kl_loss_type) in ("kl", "k1"):
        reason = "as a loss its gradient is zero on average, whatever the policies: nothing that a ratio could correct."
        override = set_to(_KL_TYPE, "k3+")
        yield Problem(_KL_TYPE, kind, reason, "Set kl_loss_type=k3+ or k2.", "NO-OP", ("kl_clip",), (override,))


def check_kl_weight(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that the weighted KL loss exists, with an estimate that the weight makes unbiased and a coefficient."""
    if spec.kl_weight is None:
        return
    missing = "there is no KL loss to weigh; KL in the reward is corrected by the clip of the policy term."
    found = _find_no_kl_loss(config, "kl_weight", spec.kl_weight.to_mapping(), missing, "weighted")
    if found is not None:
        yield found
    elif (kind := config.actor_rollout_ref.actor.kl_loss_type) not in _UNBIASED:
        reason = "r k has the gradient of the reverse KL where k is k1 or k3 with its own slope, and nowhere else."
        fix = f"Set kl_loss_type to one of {', '.join(_UNBIASED)}, or correction.kl_weight=null."
        override = set_to(_KL_TYPE, "low_var_kl")
        yield Problem(_KL_TYPE, kind, reason, fix, parts=("kl_weight",), overrides=(override,))


def _find_no_kl_loss(config: DictConfig, part: str, value: Any, missing: str, named: str) -> Problem | None:
    """Find out that the KL loss which a part is about is switched off, or has the coefficient 0."""
    actor, key = config.actor_rollout_ref.actor, f"{ACTOR}.kl_loss_coef"
    if not actor.use_kl_loss:
        override = set_to(f"{ACTOR}.use_kl_loss", True)
        fix = f"Set {override}, or correction.{part}=null."
        return Problem(f"correction.{part}", value, missing, fix, "NO-OP", (part,), (override,))
    if actor.kl_loss_coef == 0:
        reason = f"the coefficient of the {named} KL loss is 0, so that it counts nothing."
        fix = f"Set it to 0.001, or correction.{part}=null."
        return Problem(key, actor.kl_loss_coef, reason, fix, "NO-OP", (part,), (set_to(key, 0.001),))
    return None


def check_denominator(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that another count than verl's meets a loss that divides by one, and rows that are not shuffled."""
    if not spec.recounts:
        return
    actor = config.actor_rollout_ref.actor
    key, value, usual = (
        ("denominator", "kept", "original") if spec.denominator == "kept" else ("nonfinite", "excluded", "counted")
    )
    asked, parts = f"{key}={value}", (key,)
    loss_mode, release = (
        OmegaConf.select(config, LOSS_MODE),
        attributes_of(installed_release("verl") or demand_release()),
    )
    if release.find_policy_aggregation(loss_mode, actor.loss_agg_mode) not in HAS_DENOMINATOR:
        key = "actor_rollout_ref.actor.loss_agg_mode"
        reason = f"it divides by no count, so that {usual} and {value} are one."
        fix = f"Set one of {', '.join(HAS_DENOMINATOR)}, or correction.{parts[0]}={usual}."
        override = set_to(key, "token-mean")
        yield Problem(key, actor.loss_agg_mode, reason, fix, "NO-OP", parts, (override,))
    if actor.shuffle:
        key = "actor_rollout_ref.actor.shuffle"
        reason = f"{asked} counts by mini-batch before the update, and shuffling regroups the rows."
        yield Problem(key, True, reason, "Set it to false.", parts=parts, overrides=(set_to(key, False),))


def check_baseline(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that ``baseline=exclude`` meets an estimator with groups."""
    if spec.baseline == "include":
        return
    key, rows = "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"
    estimator, count = OmegaConf.select(config, key), OmegaConf.select(config, rows)
    why, overrides = "baseline=exclude takes rejected siblings out of a group, and", (set_to(_BASELINE, "include"),)
    if estimator not in GROUP_ESTIMATORS:
        fix = f"Set one of {', '.join(GROUP_ESTIMATORS)}, or {_BASELINE}=include."
        reason = f"{why} this estimator has none or mixes them."
        yield Problem(key, estimator, reason, fix, "NO-OP", ("baseline",), overrides)
    elif count == 1:
        fix = f"Set 2 or more rollouts a prompt, or {_BASELINE}=include."
        reason = f"{why} each prompt has one rollout alone."
        yield Problem(rows, count, reason, fix, "NO-OP", ("baseline",), overrides)


def check_distillation(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Refuse verl's distillation loss, which our loss would overwrite."""
    key = "distillation.enabled"
    if OmegaConf.select(config, key, default=False):
        reason = (
            "verl's worker takes one loss. With distillation it is distillation_ppo_loss, which adds the policy term "
            "and the distillation term inside, so that the correction's loss would replace both."
        )
        yield Problem(key, True, reason, "No override keeps both: distil without a correction, or correct without it.")


def check_base_loss(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check, by a probe on a small batch, that the base loss applies weights."""
    if spec.is_none:
        return
    yield from _probe(config, EVERYTHING)


def check_base_loss_of_verl(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check the same for verl's own weights, unless bypass mode uses a loss of its own."""
    asked = list_active(config)
    if spec.is_none and "rollout_is" in asked and BYPASS not in asked:
        # verl's own does not claim to be the same however a mini-batch is split.
        yield from _probe(config, (name_part("rollout_is"),), split=False)


def _probe(config: DictConfig, parts: tuple[str, ...], *, split: bool = True) -> Iterator[Problem]:
    from verl.utils.config import omega_conf_to_dataclass

    from ..base_loss_probe import probe

    actor = config.actor_rollout_ref.actor
    try:
        actor_config: Any = omega_conf_to_dataclass(actor)
    except Exception as error:
        cause = error.__cause__ or error
        section = _SECTION.search(str(error))
        unknown = _find_unknown_keys(config, section[1], parts) if section else None
        yield unknown or _build_refusal(config, str(cause) or type(cause).__name__, parts)
        return
    try:
        wrong = probe(actor_config, split=split)
    except Exception as error:
        wrong = f"it fails on a small batch: {error}"
    if wrong:
        without_scale = actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None
        fix = (
            "Set actor_rollout_ref.actor.loss_scale_factor to a constant, such as data.max_response_length."
            if without_scale
            else f"No override corrects {actor.policy_loss.loss_mode}. A loss_mode that weighs each token's policy "
            f"term (vanilla, gspo, cispo, gpg, dppo_tv, sapo) trains another objective."
        )
        scale = set_to(f"{ACTOR}.loss_scale_factor", config.data.max_response_length)
        yield Problem(
            f"{ACTOR}.policy_loss.loss_mode",
            actor.policy_loss.loss_mode,
            f"{wrong}.",
            fix,
            parts=parts,
            overrides=(scale,) if without_scale else (),
            beside={f"{ACTOR}.loss_agg_mode": actor.loss_agg_mode},
        )


def _find_unknown_keys(config: DictConfig, section: str, parts: tuple[str, ...]) -> Problem | None:
    """Find all keys of a section that verl's dataclass for it does not have; None if there are none.

    A key that another section of the actor has by this name is moved there, so that nothing it asks for is lost.
    """
    node = OmegaConf.select(config, section)
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    if target is None:
        return None
    known = {field.name for field in dataclasses.fields(get_class(target))}
    extra = [str(name) for name in node if name not in known and name != "_target_"]
    if not extra:
        return None
    overrides: list[str] = []
    sentences: list[str] = []
    for name in extra:
        key, value = f"{section}.{name}", node[name]
        instead = next((place for place in _find_keys(config, name) if place != key), None)
        if instead is None:
            sentences.append(f"What {key} asks for would not be done.")
        else:
            overrides += [*remove(key, value), set_to(instead, value)]
            sentences.append(f"Set {instead} in the place of {key}.")
    reason = f"verl has no such key there: {target.rpartition('.')[2]} does not take {', '.join(extra)}."
    key, fix = f"{section}.{extra[0]}", " ".join(sentences)
    return Problem(key, node[extra[0]], reason, fix, parts=parts, overrides=(*overrides,))


def _build_refusal(config: DictConfig, said: str, parts: tuple[str, ...]) -> Problem:
    """Build the problem of an actor that verl's dataclasses refuse, by the key that the message names, if any."""
    reason = f"verl does not take it: {' '.join(said.split()).rstrip('.?')}."
    named = [key for word in re.findall(r"\w+_\w+", said) if (key := _find_key(config, word)) is not None]
    name = next((key for key in named if key.endswith(_DEMANDED)), named[0] if named else "")
    if name.endswith(_DEMANDED):
        given = OmegaConf.select(config, f"{ACTOR}.ppo_micro_batch_size") is not None
        override = set_to(f"{ACTOR}.ppo_micro_batch_size", None) if given else set_to(f"{ACTOR}.{_DEMANDED}", 1)
    elif name == f"{ACTOR}.loss_agg_mode":
        override = set_to(name, "token-mean")
    elif (default := _find_default_that_works(config, name)) is not None:
        name, override = default
    elif name:
        return _problem(config, name, reason, f"Set {name} to a value that verl takes.", parts)
    else:
        fix = f"Change the key of {ACTOR} that verl's message is about."
        return Problem("", None, f"{ACTOR}: {reason}", fix, "ERROR", parts)
    return _problem(config, name, reason, f"Set {override}.", parts, override)


def _find_default_that_works(config: DictConfig, name: str) -> tuple[str, str] | None:
    """Find a key, the named one first, at whose default verl accepts the actor, and its override."""
    from verl.utils.config import omega_conf_to_dataclass

    # The key that verl's message names is the likeliest cause.
    for key, default in sorted(_list_defaults(config), key=lambda each: each[0] != name):
        if OmegaConf.select(config, key) == default:
            continue
        changed = copy_config(config)
        OmegaConf.update(changed, key, default, merge=False)
        try:
            omega_conf_to_dataclass(changed.actor_rollout_ref.actor)
        except Exception as error:  # of any type: then this key is not the cause
            logger.debug("%s=%s: %s", key, default, error)
            continue
        return key, set_to(key, default)
    return None


def _list_defaults(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """List keys of the actor and its sections with the plain default values of verl's dataclasses."""
    actor = config.actor_rollout_ref.actor
    for section in _list_sections(actor):
        node = OmegaConf.select(actor, section) if section else actor
        target = node.get("_target_")
        for field in dataclasses.fields(get_class(target)) if target else ():
            plain = field.default is None or isinstance(field.default, bool | int | float | str)
            if field.name in node and plain and field.default != MISSING:
                yield ".".join(filter(None, (ACTOR, section, field.name))), field.default


def _find_key(config: DictConfig, name: str) -> str | None:
    """Find the first key of the actor, or of a section of it, with this name."""
    return next(_find_keys(config, name), None)


def _find_keys(config: DictConfig, name: str) -> Iterator[str]:
    """List keys of the actor and of its sections with this name."""
    actor = config.actor_rollout_ref.actor
    places = (f"{section}.{name}" if section else name for section in _list_sections(actor))
    return (f"{ACTOR}.{place}" for place in places if _has(actor, place))


def _list_sections(node: DictConfig, place: str = "") -> Iterator[str]:
    """List the paths of a section, "" for the whole, and of all below it."""
    yield place
    for name in map(str, node):
        if isinstance(below := OmegaConf.select(node, name), DictConfig):
            yield from _list_sections(below, f"{place}.{name}" if place else name)


def _has(actor: DictConfig, place: str) -> bool:
    section, _, name = place.rpartition(".")
    return name in (OmegaConf.select(actor, section) if section else actor)


def _problem(config: DictConfig, key: str, reason: str, fix: str, parts: tuple[str, ...], *overrides: str) -> Problem:
    return Problem(key, OmegaConf.select(config, key), reason, fix, "ERROR", parts, overrides)
