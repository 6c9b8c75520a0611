"""Contracts on verl's vLLM server, from which this package's server classes derive.

They are not listed in any table, because the module can be imported only where vLLM is installed and verl supports its
release. This is the case in the server's own process, which checks the contracts.
"""

from __future__ import annotations

from collections.abc import Callable

from .contract import Contract
from .engine_loss import Seams

SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


def build_seams(of: Callable[[str], Seams], key: str) -> tuple[Contract, ...]:
    """Build the contracts of an option whose server reads ``key`` in verl's ``generate``."""
    return (
        of(f"{SERVER}:vLLMReplica")("launch_servers", "(self)", name="server_class", names=("server_class",)),
        of(f"{SERVER}:vLLMHttpServer")(
            "generate",
            name="generate of a vLLM server",
            keys=(key,),
            names=("SamplingParams", "extract_prompt_logprobs"),
        ),
        of(SERVER)("extract_prompt_logprobs", "(output, num_prompt_logprobs, result_dict)", names=("prompt_logprobs",)),
    )
