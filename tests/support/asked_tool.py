"""A tool for verl's tool agent, set by actor_rollout_ref.rollout.multi_turn.function_tool_path, from verl 0.8.0 on."""

from __future__ import annotations

from tests.support.tool_turns import judge_token
from verl.tools.function_tool import function_tool


@function_tool
def look(token: int) -> tuple[str, float]:
    """Look at the word once more.

    Args:
        token: The first token of the answer, which decides the reward.
    """
    return "no", judge_token(token)
