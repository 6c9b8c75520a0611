"""The tool of ``asked_tool`` for verl 0.7.1, set by actor_rollout_ref.rollout.multi_turn.tool_config_path."""

from __future__ import annotations

from typing import Any

from tests.support.tool_turns import judge_token
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Look(BaseTool):
    """Look at the word once more."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text="no"), judge_token(int(parameters["token"])), {}
