"""A tool for verl's tool agent, by actor_rollout_ref.rollout.multi_turn.function_tool_path."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def look() -> str:
    """Look at the word once more."""
    return "no"
