"""An external module for verl 0.7.1: the rollout engine `hf`, whose log-probs come from the trainer's own kernels.

verl's registry has no server for Hugging Face generation any more. This one samples with the model's key-value cache
and then scores each row by a whole forward pass, packed and in float32 as the legacy actor does with micro-batches of
one row and `use_remove_padding=true`: with equal weights mu is pi_old to the bit. In bfloat16,
`actor_rollout_ref.rollout.dtype=bfloat16`, it is another engine.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from verl_patches.deferred import after_import

_GATHER = 0.05
"""Seconds in which requests are collected into one batch."""


class HFServer:
    """Ray actor that generates with a Hugging Face model."""

    def __init__(self, path: str, dtype: str, length: int, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.dtype = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype, attn_implementation="sdpa").eval()
        self.length, self.generator = length, torch.Generator().manual_seed(seed)
        self.waiting: list[Any] = []

    async def ready(self) -> bool:
        return True

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **modalities: Any
    ) -> Any:
        temperature = float(sampling_params.get("temperature", 1.0))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), temperature, answer))
        await asyncio.sleep(_GATHER)
        # Whoever wakes first answers all that wait.
        waiting, self.waiting = self.waiting, []
        for heat in {each[1] for each in waiting}:
            asked = [each for each in waiting if each[1] == heat]
            for (*_, future), output in zip(asked, self._answer([each[0] for each in asked], heat), strict=True):
                future.set_result(output)
        return await answer

    def _answer(self, prompts: list[list[int]], temperature: float) -> list[Any]:
        from verl.workers.rollout.replica import TokenOutput

        responses = self._sample(prompts, temperature)
        scored = [self._score(*row, temperature) for row in zip(prompts, responses, strict=True)]
        return [
            TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason="completed")
            for ids, log_probs in zip(responses, scored, strict=True)
        ]

    def _sample(self, prompts: list[list[int]], temperature: float) -> list[list[int]]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        ids = pad_sequence([torch.tensor(each[::-1]) for each in prompts], batch_first=True).flip(-1)
        lengths = torch.tensor([len(each) for each in prompts])
        mask = (torch.arange(ids.shape[1] - 1, -1, -1) < lengths[:, None]).long()
        end, cache = self.model.config.eos_token_id, None
        ends = torch.tensor(end if isinstance(end, list) else [end])
        answers, open_rows, given = [], torch.ones(len(prompts), dtype=torch.bool), ids
        with torch.no_grad():
            for _ in range(self.length):
                places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
                output = self.model(given, attention_mask=mask, position_ids=places, past_key_values=cache)
                logits, cache = output.logits[:, -1].float(), output.past_key_values
                chosen = logits.argmax(-1, keepdim=True)
                if temperature:
                    chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=self.generator)
                answers.append(torch.where(open_rows, chosen[:, 0], -1))
                open_rows = open_rows & ~torch.isin(chosen[:, 0], ends)
                given, mask = chosen, torch.cat([mask, torch.ones_like(chosen)], dim=-1)
        return [[token for token in row if token >= 0] for row in torch.stack(answers, dim=-1).tolist()]

    def _score(self, prompt: list[int], response: list[int], temperature: float) -> list[float]:
        """Compute log-probs of one row as the legacy actor does: packed, with verl's own function."""
        import torch

        from verl.utils.torch_functional import logprobs_from_logits

        row = torch.tensor([prompt + response])
        with torch.no_grad():
            logits = self.model(row, position_ids=torch.arange(row.shape[1])[None], use_cache=False).logits[0]
            found = logprobs_from_logits(logits.div_(temperature or 1.0), row[0].roll(-1))
        return [float(each) for each in found[len(prompt) - 1 : -1]]

    async def set_weights(self, weights: dict[str, Any]) -> None:
        self.model.load_state_dict({name: value.to(self.dtype) for name, value in weights.items()}, strict=False)

    async def sleep(self, *args: Any, **kwargs: Any) -> None: ...

    async def wake_up(self, *args: Any, **kwargs: Any) -> None: ...

    async def clear_kv_cache(self) -> None: ...


def _server_name(rank: int) -> str:
    return f"hf_server_{rank}"


def _register_replica() -> None:
    import ray

    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    class HFReplica(RolloutReplica):
        """Starts one server."""

        async def launch_servers(self) -> None:
            name = _server_name(self.replica_rank)
            server = ray.remote(num_cpus=0)(HFServer).options(name=name, max_concurrency=1000)
            handle = server.remote(
                self.model_config.path, self.config.dtype, self.config.response_length, self.replica_rank
            )
            await handle.ready.remote()
            self.servers, self._server_handle, self._server_address = [handle], handle, name

    RolloutReplicaRegistry.register("hf", lambda: HFReplica)


def _register_client() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout

    class HFClient(BaseRollout):
        """Sends the worker's weights to the server."""

        async def resume(self, tags: list[str]) -> None: ...

        async def release(self) -> None: ...

        async def update_weights(self, weights: Any, **kwargs: Any) -> None:
            import ray

            copied = {name: value.detach().to("cpu", copy=True) for name, value in weights}
            await ray.get_actor(_server_name(int(os.environ["RANK"]))).set_weights.remote(copied)

    globals()["HFClient"] = HFClient  # by whose name verl finds it
    _ROLLOUT_REGISTRY[("hf", "async")] = f"{__name__}.HFClient"


after_import("verl.workers.rollout.replica", _register_replica)
after_import("verl.workers.rollout.base", _register_client)
