"""Agent loops of several turns, with or without a fault in re-tokenisation.

    actor_rollout_ref.rollout.agent.default_agent_loop=conversation

The user asks for the answer again, twice. OFFPOLICY_CONVERSATION selects what happens to the tokens:

    kept         every turn is trained on as it was sampled, after the same context that the engine had
    history      turns are passed on as text, as through a chat API: the trainer reads earlier turns re-tokenized, with
                 the log-probs of the sampled tokens; the last turn is as sampled
    context      the engine receives the user's words with one more space than the trainer
"""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

KIND = os.environ.get("OFFPOLICY_CONVERSATION", "kept")
TURNS = int(os.environ.get("OFFPOLICY_TURNS", "3"))
MOST_TOKENS = 10
"""Largest number of tokens in a turn."""
AGAIN = "again"


def fitted(log_probs: list[float], length: int) -> list[float]:
    """Cut or extend log-probs to ``length``: keep only the first values, or repeat the last value."""
    return (log_probs + log_probs[-1:] * length)[:length]


@register("conversation")
class Conversation(AgentLoopBase):
    """Agent loop of several turns; see the module's docstring."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt = await self.ct_build_initial_tokens(messages)
        seen, trained = list(prompt), list(prompt)  # by the engine, and by the trainer
        mask: list[int] = []
        log_probs: list[float] = []
        extra_fields: dict[str, Any] = {}
        for turn in range(TURNS):
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=seen,
                sampling_params={**sampling_params, "max_tokens": MOST_TOKENS},
            )
            extra_fields = extra_fields or dict(output.extra_fields)
            sampled, mu = list(output.token_ids), list(output.log_probs or [])
            said = self.tokenizer.decode(sampled, skip_special_tokens=True)
            last = turn == TURNS - 1
            if KIND == "history" and not last:
                again = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
                sampled, mu = again, fitted(mu, len(again))
            seen, trained = seen + sampled, trained + sampled
            mask, log_probs = mask + [1] * len(sampled), log_probs + mu
            if last:
                break
            answered = [*messages, {"role": "assistant", "content": said}]
            messages = [*answered, {"role": "user", "content": AGAIN}]
            spoken = [*answered, {"role": "user", "content": f"{AGAIN} "}] if KIND == "context" else messages
            before = len(trained)
            trained = (await self.ct_merge_context_msg(answered, messages, trained, mask, log_probs))[0].token_ids
            seen = (await self.ct_merge_context_msg(answered, spoken, seen, mask, log_probs))[0].token_ids
            added = len(trained) - before
            mask, log_probs = mask + [0] * added, log_probs + [0.0] * added
        most = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=trained[: len(prompt)],
            response_ids=trained[len(prompt) :][:most],
            response_mask=mask[:most],
            response_logprobs=log_probs[:most],
            num_turns=2 * TURNS,
            metrics={"num_preempted": -1},
            extra_fields=extra_fields | {"turn_scores": [], "tool_rewards": []},
        )
