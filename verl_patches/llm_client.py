"""Contracts on verl's client of its rollout servers and on its callers.

In the V1 trainer's asynchronous modes, and in fully_async_policy, a subclass of the client records the weight version
of each attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .contract import installed_release, wrap
from .engine_loss import Seams
from .releases import attributes_of, specifiers

_TRAINERS = "verl.trainer.ppo.v1"
_PARAMETERS = (
    "(self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None, "
    "mm_processor_kwargs=None, **kwargs)"
)
_RESUMING = ("FullyAsyncLLMServerClient", "get_client")
_of = partial(Seams, releases=specifiers(lambda release: release.token_versions))
_client = _of("verl.workers.rollout.llm_server")

SEAMS = (
    # Each request is sent to one server, which reports its version together with the tokens.
    _client("LLMServerClient.generate", _PARAMETERS, keys=("global_steps",), names=("extra_fields", "remote")),
    # The resume loop: each attempt calls the base class; after an aborted attempt, there is another attempt.
    _client(
        "FullyAsyncLLMServerClient.generate",
        _PARAMETERS,
        keys=("aborted", "global_steps", "min_global_steps", "max_global_steps"),
        names=("super", "generate", "token_ids", "extend", "stop_reason"),
    ),
    _of(f"{_TRAINERS}.trainer_separate_async:PPOTrainerSeparateAsync")(
        "get_llm_client", "(self)", name="get_llm_client of separate_async", names=_RESUMING
    ),
    _of(f"{_TRAINERS}.trainer_colocate_async:PPOTrainerColocateAsync")(
        "get_llm_client", "(self)", name="get_llm_client of colocate_async", names=_RESUMING
    ),
    _of(f"{_TRAINERS}.trainer_base:PPOTrainer")("get_llm_client", "(self)"),
    _of("verl.trainer.main_ppo:TaskRunnerV1.__ray_metadata__.modified_class")(
        "init_agent_loop_manager", names=("get_llm_client",)
    ),
    # A tool agent uses one request id, and keeps the extra fields of its first turn unchanged.
    _of("verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop")(
        "_handle_generating_state",
        name="turns of a tool agent",
        keys=("max_global_steps",),
        names=("request_id", "extra_fields", "update"),
    ),
)
"""Parts of verl that ``recipe.offpolicy.staleness.client`` overrides or relies on."""

_OF_FULLY_ASYNC = _of("verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncLLMServerManager")(
    "get_client", name="get_client of fully_async", names=("get_client",)
)


def note_by(note: Callable[[Any], Any]) -> None:
    """Make ``note(client)`` replace the clients that fully_async_policy's rollouter gives its agent loops; once."""
    release = installed_release("verl")
    if release is not None and attributes_of(release).token_versions:
        wrap(_OF_FULLY_ASYNC, lambda original, *args, **kwargs: note(original(*args, **kwargs)))
