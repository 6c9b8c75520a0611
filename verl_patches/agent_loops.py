"""Contracts on verl's agent loops, whose rows process rewards score before they get their reward; nothing is patched.

A manager of ours starts workers of ours, by verl's key ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``.
Log-probs of a prompt come from ``vLLMHttpServer.generate(self, prompt_ids, sampling_params, request_id, ...)``, whose
``extra_fields`` hold ``prompt_ids``, ``prompt_logprobs``, ``global_steps`` and, from 0.9.1 on, ``num_cached_tokens``.
"""

from __future__ import annotations

from functools import partial

from .engine_loss import seam
from .releases import specifiers

_LOOP = "verl.experimental.agent_loop.agent_loop"
_seam = partial(seam, releases=specifiers(lambda release: release.scores_prompts))
_seam_v1 = partial(seam, releases=specifiers(lambda release: bool(release.v1_modes)))
_TQ = "verl.trainer.ppo.v1.agent_loop_tq"

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
