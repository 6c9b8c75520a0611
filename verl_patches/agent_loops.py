"""Contracts on verl's agent loops, whose rows process rewards score before they get their reward; nothing is patched.

A manager of ours starts workers of ours, by verl's key ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``.
Log-probs of a prompt come from ``vLLMHttpServer.generate(self, prompt_ids, sampling_params, request_id, ...)`` of a
server class of ours, which verl starts by its registry of replicas.
"""

from __future__ import annotations

from functools import partial

from .contract import Contract
from .engine_loss import seam
from .releases import specifiers

_LOOP = "verl.experimental.agent_loop.agent_loop"
_seam = partial(seam, releases=specifiers(lambda release: release.scores_prompts), option="process_reward")
_seam_v1 = partial(seam, releases=specifiers(lambda release: bool(release.v1_modes)), option="process_reward")
_TQ = "verl.trainer.ppo.v1.agent_loop_tq"
_REPLICA = "verl.workers.rollout.replica"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_CLIENT = "verl.workers.rollout.llm_server:LLMServerClient"

SEAMS = (
    # Every agent loop's output passes here, behind its last token.
    _seam(
        "_agent_loop_postprocess",
        f"{_LOOP}:AgentLoopWorker._agent_loop_postprocess",
        "(self, output, validate, **kwargs)",
        names=("extra_fields", "_compute_score"),
    ),
    _seam(
        "_run_agent_loop",
        f"{_LOOP}:AgentLoopWorker._run_agent_loop",
        None,
        keys=("validate",),
        names=("llm_client", "_agent_loop_postprocess"),
    ),
    # Extra fields become columns of the batch.
    _seam("_postprocess", f"{_LOOP}:AgentLoopWorker._postprocess", None, names=("extra_fields",)),
    _seam(
        "_init_agent_loop_workers",
        f"{_LOOP}:AgentLoopManager._init_agent_loop_workers",
        "(self)",
        names=("agent_loop_workers_class",),
    ),
    _seam(
        "register of replicas", f"{_REPLICA}:RolloutReplicaRegistry.register", "(name, loader)", names=("_registry",)
    ),
    _seam("get of replicas", f"{_REPLICA}:RolloutReplicaRegistry.get", "(name)", names=("_registry",)),
    # Both have more parameters from 0.9.0 on.
    _seam("_acquire_server", f"{_CLIENT}._acquire_server", None, names=("acquire_server",)),
    _seam("_release_server", f"{_CLIENT}._release_server", None, names=("release_server",)),
)
"""What ``recipe.offpolicy.extensions.process_reward.manager`` overrides or relies on."""
SEAMS_V1 = (
    _seam_v1(
        "_agent_loop_postprocess of TransferQueue",
        f"{_TQ}:AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess",
        None,
        names=("_compute_score", "as_dict"),
    ),
)
"""Those of the V1 trainer."""


def build_server_seams() -> tuple[Contract, ...]:
    """Build the contracts on verl's vLLM server, which ``process_reward.scoring_server`` overrides.

    They are in no table: the module imports where vLLM is installed and verl knows its release, as in the server's own
    process, which checks them.
    """
    return (
        _seam("server_class", f"{_SERVER}:vLLMReplica.launch_servers", "(self)", names=("server_class",)),
        _seam(
            "generate of a vLLM server",
            f"{_SERVER}:vLLMHttpServer.generate",
            None,
            keys=("global_steps",),
            names=("SamplingParams", "extract_prompt_logprobs"),
        ),
        _seam(
            "extract_prompt_logprobs",
            f"{_SERVER}:extract_prompt_logprobs",
            "(output, num_prompt_logprobs, result_dict)",
            names=("prompt_logprobs",),
        ),
    )
