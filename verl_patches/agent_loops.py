"""Contracts on verl's agent loops: rows are scored for process rewards before verl's reward. Nothing is patched.

verl's key ``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` selects this package's manager, which starts
this package's workers. Log-probs of a prompt come from ``vLLMHttpServer.generate(self, prompt_ids, sampling_params,
request_id, ...)`` of this package's server class, which verl starts through its registry of replicas.
"""

from __future__ import annotations

from functools import partial

from . import vllm_server
from .contract import Contract
from .engine_loss import Seams
from .releases import specifiers

_of = partial(Seams, releases=specifiers(lambda release: release.scores_prompts), option="process_reward")
_worker = _of("verl.experimental.agent_loop.agent_loop:AgentLoopWorker")
_replicas = _of("verl.workers.rollout.replica:RolloutReplicaRegistry")
_client = _of("verl.workers.rollout.llm_server:LLMServerClient")

SEAMS = (
    # The output of every agent loop passes through this method, after the loop's last token.
    _worker("_agent_loop_postprocess", "(self, output, validate, **kwargs)", names=("extra_fields", "_compute_score")),
    _worker("_run_agent_loop", keys=("validate",), names=("llm_client", "_agent_loop_postprocess")),
    # Monte-Carlo checks use this method to reward rollouts.
    _worker("_compute_score", "(self, outputs, kwargs)", names=("reward_score", "reward_loop_worker_handles")),
    # Extra fields become columns of the batch.
    _worker("_postprocess", names=("extra_fields",)),
    _of("verl.experimental.agent_loop.agent_loop:AgentLoopManager")(
        "_init_agent_loop_workers", "(self)", names=("agent_loop_workers_class",)
    ),
    _replicas("register", "(name, loader)", name="register of replicas", names=("_registry",)),
    _replicas("get", "(name)", name="get of replicas", names=("_registry",)),
    # In 0.9.0 and later, both methods have more parameters.
    _client("_acquire_server", names=("acquire_server",)),
    _client("_release_server", names=("release_server",)),
)
"""Parts of verl that ``recipe.offpolicy.extensions.process_reward.manager`` overrides or relies on."""

_worker_v1 = Seams(
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__.modified_class",
    specifiers(lambda release: bool(release.v1_modes)),
    "process_reward",
)
SEAMS_V1 = (
    _worker_v1(
        "_agent_loop_postprocess",
        name="_agent_loop_postprocess of TransferQueue",
        names=("_compute_score", "as_dict"),
    ),
)
"""Contracts on the V1 trainer's agent loops."""

_turns = partial(Seams, releases=specifiers(lambda release: True), option="turn_credit")
_tools = _turns("verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop")
TURN_SEAMS = (
    # output.extra_fields.update({"turn_scores": agent_data.turn_scores, "tool_rewards": agent_data.tool_rewards})
    _tools("run", name="rewards of turns", keys=("turn_scores", "tool_rewards"), names=("extra_fields", "update")),
    # if tool_reward is not None: agent_data.tool_rewards.append(tool_reward): one entry per call, without its turn
    _tools("_handle_processing_tools_state", name="rewards of tools", names=("tool_rewards", "append")),
)
"""Contracts on the rewards of turns, which ``recipe.offpolicy.extensions.turn_credit`` reads from ``extra_fields``."""


def build_server_seams() -> tuple[Contract, ...]:
    """Build the contracts on verl's vLLM server, which ``process_reward.scoring_server`` overrides."""
    return vllm_server.build_seams(_of, "global_steps")
