"""vLLM servers that return, with each token, the ids that it could have been.

Seams in verl 0.9.1: ``RolloutReplicaRegistry.register(name, loader)``, the attribute ``server_class`` of
``vLLMReplica``, ``_preprocess_engine_kwargs(self, engine_kwargs)`` of ``vLLMHttpServer``, and in its ``generate`` the
names ``SamplingParams``, by which it asks for a token's own log-prob alone (``logprobs=0``), and
``extract_prompt_logprobs(output, num_prompt_logprobs, result_dict)``, which gets vLLM's answer whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import ray
from vllm.logprobs import FlatLogprobs, Logprob

from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout import vllm_async_server
from verl_patches import engine_loss, truncated_sampling

from .client import ANSWER
from .support_settings import SupportSettings
from .token_supports import read_supports

Extract = Callable[[Any, int | None, dict[str, Any]], None]


def ask_for_supports(build: Callable[..., Any], settings: SupportSettings) -> Callable[..., Any]:
    """Wrap vLLM's ``SamplingParams``: a request for log-probs of the sampled tokens is one for those of K more."""

    def build_asking(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("logprobs") == 0:
            # Flat: two lists a request, and not an object an id.
            kwargs |= {"logprobs": settings.size, "flat_logprobs": True}
            if settings.min_p is not None:
                kwargs.setdefault("min_p", settings.min_p)
        return build(*args, **kwargs)

    return build_asking


def extract_supports(extract: Extract) -> Extract:
    """Wrap verl's ``extract_prompt_logprobs``: the supports of the sampled tokens are put beside what it extracts."""

    def extract_both(output: Any, num_prompt_logprobs: int | None, result_dict: dict[str, Any]) -> None:
        extract(output, num_prompt_logprobs, result_dict)
        sampled = output.outputs[0]
        if isinstance(found := sampled.logprobs, FlatLogprobs):
            count = len(sampled.token_ids)
            result_dict[ANSWER] = read_supports(found.token_ids, found.logprobs, count)
            # verl reads the sampled token's own log-prob alone, and of flat ones would make an object an id.
            step = max(len(found.token_ids) // max(count, 1), 1)
            own = zip(found.token_ids[::step], found.logprobs[::step], strict=True)
            sampled.logprobs = [{token: Logprob(log_prob)} for token, log_prob in own]

    return extract_both


class SupportServer(vllm_async_server.vLLMHttpServer):
    """verl's vLLM server that returns supports.

    Args:
        support: what is asked for.
    """

    def __init__(self, *args: Any, support: SupportSettings, **kwargs: Any) -> None:
        engine_loss.check(truncated_sampling.build_server_seams())
        self.support = support
        # The server is alone in its process, and reads both names at each request.
        vllm_async_server.SamplingParams = ask_for_supports(vllm_async_server.SamplingParams, support)
        vllm_async_server.extract_prompt_logprobs = extract_supports(vllm_async_server.extract_prompt_logprobs)
        super().__init__(*args, **kwargs)

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        engine_kwargs["max_logprobs"] = max(self.support.size, int(engine_kwargs.get("max_logprobs") or 0))


class SupportActor:
    """Ray's actor class of ``SupportServer``, as verl's replica uses it.

    Args:
        actor: of the server; made by ``ray.remote``.
        support: an argument of the server beside verl's.
    """

    def __init__(self, actor: Any, support: SupportSettings) -> None:
        self._actor, self._support = actor, support

    def options(self, **options: Any) -> SupportActor:
        """Choose Ray's options of the next actor."""
        return SupportActor(self._actor.options(**options), self._support)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start a server."""
        return self._actor.remote(*args, support=self._support, **kwargs)


class SupportReplica(vllm_async_server.vLLMReplica):
    """verl's replica of servers that return supports."""

    support: ClassVar[SupportSettings]
    """Of this process's run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = SupportActor(ray.remote(SupportServer), self.support)


def serve_supports(settings: SupportSettings) -> None:
    """Let replicas of vLLM that this process starts return supports."""
    SupportReplica.support = settings
    RolloutReplicaRegistry.register("vllm", lambda: SupportReplica)
