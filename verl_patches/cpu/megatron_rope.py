"""Give mbridge the base of the rotary embedding from its place in transformers 5.

mbridge reads `config.rope_theta`, which transformers moved to `config.rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

_MODULE = "mbridge.core.bridge"
CONTRACT = Contract(
    name="megatron_rope",
    target=f"{_MODULE}:Bridge.__init__",
    signature="(self, hf_config, dtype=torch.bfloat16, parallel_states=None, make_vocab_size_divisible_by=None)",
    distribution="mbridge",
    releases="==0.15.*",
)


def _init(original: Callable[..., None], self: Any, hf_config: Any, *args: Any, **kwargs: Any) -> None:
    # transformers 4 has no such attribute.
    parameters = getattr(hf_config, "rope_parameters", None)
    if parameters and not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = parameters["rope_theta"]
    original(self, hf_config, *args, **kwargs)


PATCH = ReleasePatch((Wrapping(_init, CONTRACT),), after=_MODULE)
