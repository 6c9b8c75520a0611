"""The table of extensions: section of the configuration -> class, imported when the section is on.

A section is on if it is a mapping, even an empty one (``{}``), and off if it is null or absent.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..batch.configured import Configured
from ..correction import Problem, SpecError
from ..correction.problem import CheckError
from .add_on import Extension

KEY = "offpolicy.extensions"
"""A fork's own sections -> "module:Class"; it reaches Ray's processes with the rest of the configuration."""
SHIPPED: dict[str, str] = {
    "ess_lr": "recipe.offpolicy.extensions.ess_lr:EssLr",
    "length_penalty": "recipe.offpolicy.extensions.length_penalty.length_penalty:LengthPenalty",
    "pass_at_k": "recipe.offpolicy.extensions.pass_at_k.pass_at_k:PassAtK",
    "optimal_baseline": "recipe.offpolicy.extensions.optimal_baseline:OptimalBaseline",
    "turn_credit": "recipe.offpolicy.extensions.turn_credit.turn_credit:TurnCredit",
    "process_reward": "recipe.offpolicy.extensions.process_reward.prefix_value_rewards:PrefixValueRewards",
    # After the other sections, because it replaces their advantages in the distilled rows.
    "opd": "recipe.offpolicy.extensions.opd.distillation:OnPolicyDistillation",
}
"""Sections of this package -> "module:Class". Hooks run in this order, followed by a fork's hooks."""

own_launch: ContextVar[bool] = ContextVar("own_launch", default=True)
"""Whether the user launches the run: for an unknown script no class is imported and no address is contacted."""


def list_registered(config: DictConfig) -> dict[str, str]:
    """List all sections with a registered class, on or off."""
    own = OmegaConf.select(config, KEY)
    plain: Any = OmegaConf.to_container(own, resolve=True) if isinstance(own, DictConfig) else {}
    return SHIPPED | plain


def load_extensions(config: DictConfig) -> tuple[Extension, ...]:
    """Create the enabled extensions, in the order of their hooks.

    Raises:
        CheckError: a class cannot be imported, or settings are malformed; all problems at once.
    """
    made: list[Extension] = []
    problems: list[Problem] = []
    for section, target in list_registered(config).items():
        if not isinstance(node := OmegaConf.select(config, section), DictConfig):
            continue
        if section not in SHIPPED and not own_launch.get():
            continue
        settings: Any = OmegaConf.to_container(node, resolve=True)
        try:
            made.append(_class_of(section, target)(section, settings))
        except SpecError as error:
            problems.append(error.problem)
        except CheckError as error:
            problems += error.problems
    if problems:
        raise CheckError(problems)
    return tuple(made)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find invalid values of ``offpolicy.extensions``, and sections that are not mappings."""
    run = Configured(config)
    own = run.get(KEY)
    if own is not None and not isinstance(own, DictConfig):
        reason, fix = (
            "this is not a mapping of sections to classes.",
            f"Set {KEY}.SECTION=module:Class, or remove the key.",
        )
        yield run.problem(KEY, reason, fix, {KEY: {}}, ())
        return
    for section in list_registered(config):
        key, node = f"{KEY}.{section}", run.get(section)
        if node is None and section not in SHIPPED:
            reason = f"the section {section} is missing, so the extension is off."
            yield run.problem(
                key, reason, f"Set +{section}.KEY=VALUE, or remove this entry.", parts=(), verdict="NO-OP"
            )
        elif isinstance(node, DictConfig) and section not in SHIPPED and not own_launch.get():
            reason = "code that a script names is not imported, so it was not checked whether the extension is live."
            fix = "Check the launch's overrides without --script, in the folder of its code."
            yield run.problem(key, reason, fix, parts=(), verdict="NOTE")
        elif node is not None and not isinstance(node, DictConfig):
            fix = f"Set {section}.KEY=VALUE, or {section}=null."
            yield run.problem(section, "the section must hold keys.", fix, parts=())


def _class_of(section: str, target: str) -> type[Extension]:
    key = f"{KEY}.{section}"
    module, _, name = str(target).partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f"no such class can be imported ({error})."
        fix = "Set the entry to module:Class, with the module on PYTHONPATH, or remove it."
        raise SpecError(reason, fix, key=key, value=target) from error
    if not (isinstance(found, type) and issubclass(found, Extension)):
        reason = "the class is not a subclass of recipe.offpolicy.extensions.add_on.Extension."
        raise SpecError(reason, "Derive the class from it, or remove the entry.", key=key, value=target)
    return found
