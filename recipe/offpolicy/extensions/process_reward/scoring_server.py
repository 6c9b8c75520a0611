"""vLLM servers that score all prefixes of a row in one call, for every trainer of verl.

Patched in verl 0.9.1: ``RolloutReplicaRegistry.register(name, loader)``, the attribute ``server_class`` of
``vLLMReplica``, ``vLLMHttpServer.generate(self, prompt_ids, sampling_params, request_id, ...)``, and
``extract_prompt_logprobs(output, num_prompt_logprobs, result_dict)``, with which the server reads prompts' log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from vllm.logprobs import FlatLogprobs

from verl.workers.rollout.vllm_rollout import vllm_async_server
from verl_patches import rollout_seams
from verl_patches.contract import check_all

from .prefix_scorer import PROMPT, ScoredPrompt, Tail, TailScores, score_tails

Extract = Callable[[Any, int | None, dict[str, Any]], None]


def keep_flat(extract: Extract) -> Extract:
    """Wrap verl's ``extract_prompt_logprobs`` to return flat log-probs unchanged, with the cached token count."""

    def extract_or_keep(output: Any, num_prompt_logprobs: int | None, result_dict: dict[str, Any]) -> None:
        found = output.prompt_logprobs
        if isinstance(found, FlatLogprobs):
            result_dict[PROMPT] = ScoredPrompt(found.token_ids, found.logprobs, output.num_cached_tokens)
        else:
            extract(output, num_prompt_logprobs, result_dict)

    return extract_or_keep


class ScoringServer(vllm_async_server.vLLMHttpServer):
    """verl's vLLM server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_all(rollout_seams.build_scoring_server())
        # This is the only server in its process, and it looks up the function by name for each answer.
        vllm_async_server.extract_prompt_logprobs = keep_flat(vllm_async_server.extract_prompt_logprobs)
        super().__init__(*args, **kwargs)

    async def score_tails(self, row: Sequence[int], tails: Sequence[Tail], read_cache: bool) -> TailScores:
        """Score tails after prefixes of a row, with the loaded weights; see ``prefix_scorer.score_tails``."""
        return await score_tails(self.generate, row, tails, read_cache=read_cache)


class ScoringReplica(vllm_async_server.vLLMReplica):
    """verl's replica of servers that score prefixes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(ScoringServer)
