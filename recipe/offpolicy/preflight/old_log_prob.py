"""The choice of ``correction.proximal=auto``: skip the forward pass for pi_old where the loss computes the same.

With one gradient step on each batch, the weights that would compute pi_old are those of the step. What verl does
between the two was read in verl 0.7.1, 0.8.0, 0.9.0 and 0.9.1, for the V0 and V1 trainers, the engine on FSDP and the
legacy FSDP actor: one function computes both log-probs, of the same rows in the same order, and in the same
micro-batches where these are configured alike. Whatever else could tell the two apart is a condition here, and what is
not known counts as different.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import FULLY_ASYNC, count_prompts, find_program_mode

from ..correction import CorrectionSpec, SpecError
from ..correction.problem import format_value
from ..correction.proximal import Proximal
from ..extensions.registry import load_extensions
from .dropout import describe_noise
from .verl_keys.estimators import WITHOUT_PI_OLD
from .verl_keys.keys import ACTOR, ROLLOUT, list_active
from .verl_keys.router_replay import find_router_replay

AUTO = "auto"
"""Value of ``correction.proximal``: ``reuse`` where that is exact, else ``recompute``."""
KEY = "correction.proximal"
_SIZES = (f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs")
ONE_ROW_A_SAMPLE = ("single_turn_agent", "tool_agent")
"""verl's agent loops; one of the user's own may return several rows, which make several mini-batches."""


@dataclass(frozen=True)
class ProximalChoice:
    """The resolution of ``correction.proximal=auto``, with its reason.

    Attributes:
        proximal: ``reuse`` or ``recompute``.
        said: why, in a line; empty where there is nothing to choose, as with several gradient steps on a batch.
    """

    proximal: Literal["reuse", "recompute"]
    said: str = ""


def read_correction(config: DictConfig) -> Any:
    """Read the plain values under ``correction``, with ``proximal=auto`` resolved; None if there are none.

    Raises:
        SpecError: ``proximal`` is nothing that there is.
    """
    node = config.get("correction")
    values: Any = None if node is None else OmegaConf.to_container(node, resolve=True)
    if not isinstance(values, dict) or "proximal" not in values:
        return values
    options = (AUTO, *get_args(Proximal))
    if (given := values["proximal"]) not in options:
        near = difflib.get_close_matches(str(given), options, 1)
        fix = f"Set one of {', '.join(options)}."
        raise SpecError("no such choice.", fix, key=KEY, value=given, mend={KEY: (*near, AUTO)[0]})
    return values | {"proximal": choose_proximal(config).proximal} if given == AUTO else values


def choose_proximal(config: DictConfig) -> ProximalChoice:
    """Choose between ``reuse`` and ``recompute`` for a run whose shadows and fallbacks are resolved."""
    values: Any = OmegaConf.to_container(config.correction, resolve=True)
    values |= {"proximal": "recompute"}
    if _explain_refusal(values) or CorrectionSpec.from_mapping(values).is_none or not _has_one_step(config):
        return ProximalChoice("recompute")
    if why := next(_find_reasons(config, values), ""):
        return ProximalChoice("recompute", f"{KEY}=auto is recompute, although a batch gets one gradient step: {why}.")
    return ProximalChoice(
        "reuse", f"{KEY}=auto is reuse: a batch gets one gradient step, whose own log-probs are pi_old."
    )


def count_gradient_steps(config: DictConfig) -> float:
    """Compute the optimizer steps that each batch gets, by its configured size."""
    actor = config.actor_rollout_ref.actor
    steps: float = count_prompts(config) / actor.ppo_mini_batch_size * actor.ppo_epochs
    return steps


def check_one_mini_batch(spec: CorrectionSpec, config: DictConfig, rows: int) -> None:
    """Check that a batch of ``rows`` makes one mini-batch, as ``reuse`` assumes; rollouts may return extra rows.

    Raises:
        SpecError: it makes several mini-batches.
    """
    expected = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    if spec.proximal == "reuse" and rows > expected:
        raise SpecError(
            f"a batch of {rows} rows came, and a mini-batch takes {expected}, so that it would get several gradient "
            f"steps, of which only the first starts at pi_old.",
            key=KEY,
            value="reuse",
            mend={KEY: "recompute"},
        )


def _has_one_step(config: DictConfig) -> bool:
    sizes = [count_prompts(config), *(OmegaConf.select(config, key) for key in _SIZES)]
    return all(isinstance(size, int) and size > 0 for size in sizes) and count_gradient_steps(config) == 1


def _find_reasons(config: DictConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """Find reasons why a single gradient step may not see pi_old, from the cheapest check to the dearest."""
    yield from _find_path_reasons(config)
    yield from _find_early_readers(config)
    yield from _find_correction_reasons(config, values)
    yield from _find_micro_batch_reasons(config)
    if noise := describe_noise(config):
        yield noise


def _find_path_reasons(config: DictConfig) -> Iterator[str]:
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in ("fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={strategy}, where it was not shown to be exact"
    if find_program_mode(config) == FULLY_ASYNC:
        updates = OmegaConf.select(config, "async_training.trigger_parameter_sync_step", default=1)
        if updates != 1:
            yield f"pi_old is that of the first of {updates} updates"
    elif OmegaConf.select(config, "trainer.use_v1"):
        mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
        if (updates := OmegaConf.select(config, f"trainer.v1.{mode}.parameter_sync_step") or 1) != 1:
            yield f"pi_old is that of the first of {updates} updates"
        loop = OmegaConf.select(config, f"{ROLLOUT}.agent.default_agent_loop")
        if loop not in ONE_ROW_A_SAMPLE:
            yield f"the agent loop {loop} may return several rows a sample"
    if OmegaConf.select(config, f"{ACTOR}.shuffle"):
        yield f"{ACTOR}.shuffle=true puts other rows together"
    if replay := find_router_replay(config):
        yield f"{replay}: routes of the two passes may differ"


def _find_early_readers(config: DictConfig) -> Iterator[str]:
    if OmegaConf.select(config, "algorithm.use_kl_in_reward"):
        yield "the KL in the reward reads it"
    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    if estimator not in WITHOUT_PI_OLD:
        yield f"algorithm.adv_estimator={estimator} may read it"
    if OmegaConf.select(config, f"{ACTOR}.calculate_sum_pi_squared"):
        yield f"{ACTOR}.calculate_sum_pi_squared=true is computed with it"
    if list_active(config):
        yield "verl's own correction reads it"
    for extension in load_extensions(config):
        if extension.reads_old_log_prob:
            yield f"the extension {extension.section} reads it"


def _find_correction_reasons(config: DictConfig, values: Mapping[str, Any]) -> Iterator[str]:
    if why := _explain_refusal({**values, "proximal": "reuse"}):
        yield why
    shadows = OmegaConf.select(config, "offpolicy.shadow") or ()
    for name in shadows:
        if not isinstance(shadows, DictConfig) or _explain_refusal({**_to_plain(shadows[name]), "proximal": "reuse"}):
            yield f"the shadow {name} may need it"
    for name, alarm in (OmegaConf.select(config, "offpolicy.alarms") or {}).items():
        fallback = alarm.get("fallback") if isinstance(alarm, DictConfig) else None
        if fallback and (not isinstance(fallback, DictConfig) or fallback.correction.get("proximal") != "reuse"):
            yield f"the fallback of alarm {name} may need it"


def _find_micro_batch_reasons(config: DictConfig) -> Iterator[str]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    pairs = [("use_dynamic_bsz", "log_prob_use_dynamic_bsz")]
    if actor.use_dynamic_bsz:
        pairs.append(("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"))
    else:
        pairs.append(("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"))
    for ours, theirs in pairs:
        trained, scored = actor.get(ours), rollout.get(theirs)
        if trained is None or trained != scored:
            yield f"{ROLLOUT}.{theirs}={scored} with {ACTOR}.{ours}={trained}: kernels may round differently"


def _explain_refusal(values: Mapping[str, Any]) -> str:
    """Return why the values make no valid correction; empty if they do."""
    try:
        CorrectionSpec.from_mapping(values)
    except SpecError as error:
        problem = error.problem
        return f"{problem.key}={format_value(problem.value)}" if problem.key else problem.reason
    return ""


def _to_plain(node: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(node, resolve=True)
    return values
