"""An external module for verl by which each answer calls a tool, and what each turn returned is kept.

Each turn but the first returns other routes of the tokens before it than they were sampled with, as newer weights or
another batch would choose: on one machine and by the same weights they are mostly the same.

    OFFPOLICY_TURNS=folder    a file for each row: routes of its turns as the server sent them, and of its output

Its parser of tool calls is ``multi_turn.format=asks``; the tool is in ``asked_tool.py``. The agent loop is verl's own.
"""

from __future__ import annotations

import functools
import json
import os
import uuid
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from verl_patches.deferred import after_import

EXPERTS = 8
"""Sizes of the quickstart's mixture of experts."""
FOLDER = os.environ.get("OFFPOLICY_TURNS")

_turns: ContextVar[list[Any] | None] = ContextVar("turns", default=None)


def judge_token(token: int) -> float:
    """The reward that the tool returns for an answer, given its first token."""
    return (token % 5) / 4


def _add_parser() -> None:
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

    @ToolParser.register("asks")
    class AskingParser(ToolParser):
        async def extract_tool_calls(self, responses_ids: Any, tools: Any = None) -> Any:
            text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
            return text, [FunctionCall(name="look", arguments=json.dumps({"token": int(responses_ids[0])}))]


def _keep_turns() -> None:
    from verl.workers.rollout.llm_server import LLMServerClient

    generate = LLMServerClient.generate

    @functools.wraps(generate)
    async def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await generate(self, *args, **kwargs)
        turns = _turns.get()
        if turns is not None and output.routed_experts is not None:
            routes = np.array(output.routed_experts)
            if turns:
                before = routes[: len(turns[-1])]
                before[:] = (before + 1) % EXPERTS
            turns.append(routes)
            output.routed_experts = routes.copy()
        return output

    LLMServerClient.generate = noting


def _write_rows() -> None:
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    run = ToolAgentLoop.run

    @functools.wraps(run)
    async def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        turns: list[Any] = []
        token = _turns.set(turns)
        try:
            output = await run(self, *args, **kwargs)
        finally:
            _turns.reset(token)
        named = {f"turn{place}": routes for place, routes in enumerate(turns)}
        path = Path(str(FOLDER)) / f"{uuid.uuid4().hex}.npz"
        np.savez(path, final=output.routed_experts, mask=output.response_mask, prompt=len(output.prompt_ids), **named)
        return output

    ToolAgentLoop.run = writing


if FOLDER:
    after_import("verl.experimental.agent_loop.tool_parser", _add_parser)
    after_import("verl.workers.rollout.llm_server", _keep_turns)
    after_import("verl.experimental.agent_loop.tool_agent_loop", _write_rows)
