"""Checks of what the support of truncated sampling goes together with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import STRATEGY, live_path

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...correction.requirement import find_unmet
from ...support.obstacles import REQUIREMENTS
from ...support.support_settings import SUPPORT, SupportSettings
from .config_reader import ROLLOUT
from .config_reader import SUPPORT_PART as PART

_OFF = set_to(SUPPORT, None)
_STRATEGIES = ("fsdp", "fsdp2")


def check_support(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check what hides logits or supports, or leaves the support without effect; nothing where none is replayed."""
    if spec.support is None:
        return
    path = live_path(config)
    if not path.attributes.truncated_support:
        reason = f"verl {path.release} is not tested with it."
        yield Problem(SUPPORT, spec.support, reason, f"Use verl 0.9.1, or set {_OFF}.", parts=(PART,))
        return
    if path.strategy not in _STRATEGIES:
        reason = f"correction.support={spec.support}: supports are replayed in verl's FSDP engine alone."
        override = set_to(STRATEGY, "fsdp2")
        yield Problem(STRATEGY, path.strategy, reason, f"Set {override}, or {_OFF}.", parts=(PART,))

    def read(key: str) -> Any:
        value = OmegaConf.select(config, key)
        return "on" if isinstance(value, DictConfig) else value

    yield from find_unmet(REQUIREMENTS, read, _OFF, (PART,), {SUPPORT: spec.support})
    if not _truncates(config):
        reason = "nothing truncates: the support is the whole vocabulary, and every token's is larger than can be sent."
        fix = f"Set {ROLLOUT}.top_p=0.9 for example, or {_OFF}."
        yield Problem(SUPPORT, spec.support, reason, fix, "NO-OP", (PART,))


def _truncates(config: DictConfig) -> bool:
    settings = SupportSettings.from_config(config)
    top_p, top_k = (OmegaConf.select(config, f"{ROLLOUT}.{name}") for name in ("top_p", "top_k"))
    return (
        (top_p is not None and top_p < 1)
        or (top_k is not None and top_k > 0)
        or (settings is not None and settings.min_p is not None)
    )
