"""Let verl remove padding without flash-attn, which needs CUDA.

verl takes four functions that gather and scatter rows from flash-attn, and also ships them in plain PyTorch, for NPUs.
If flash-attn is missing, this patch uses those; from 0.9.1 verl does the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..contract import Contract
from ..releases import specifiers
from .release_patch import ReleasePatch, Wrapping

_MODULE = "verl.utils.attention_utils"
_PLAIN = "verl.utils.npu_flash_attn_utils"
_NAMES = ("index_first_axis", "pad_input", "rearrange", "unpad_input")


def _functions(original: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    try:
        return original()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "flash_attn":
            raise
        plain = importlib.import_module(_PLAIN)
        return tuple(getattr(plain, name) for name in _NAMES)


PATCH = ReleasePatch(
    (
        Wrapping(
            _functions,
            Contract(
                "padding",
                f"{_MODULE}:_get_attention_functions",
                "()",
                "verl",
                specifiers(lambda release: not release.unpads_alone),
            ),
        ),
    ),
    cause=lambda release: not release.unpads_alone,
    after=_MODULE,
)
