"""Pass the names of a model's layers to FSDP2 as the list that verl 0.7.1 expects.

vLLM's CPU build needs transformers 5, which returns these names as a set; verl 0.7.1 takes the first one by index.
Later releases also convert them to a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Contract
from ..releases import specifiers
from .release_patch import ReleasePatch, Wrapping

_MODULE = "verl.utils.fsdp_utils"
_NAMES = "_no_split_modules"


def _apply(original: Callable[..., None], model: Any, fsdp_kwargs: Any, config: Any) -> None:
    # A set has no order, but verl takes the first name, which must be the same on every rank.
    if isinstance(names := getattr(model, _NAMES, None), set | frozenset):
        setattr(model, _NAMES, sorted(names))
    original(model, fsdp_kwargs, config)


PATCH = ReleasePatch(
    (
        Wrapping(
            _apply,
            Contract(
                name="layer_names",
                target=f"{_MODULE}:apply_fsdp2",
                signature="(model, fsdp_kwargs, config)",
                distribution="verl",
                releases=specifiers(lambda release: release.legacy_actors),
            ),
        ),
    ),
    cause=lambda release: release.legacy_actors,
    after=_MODULE,
)
