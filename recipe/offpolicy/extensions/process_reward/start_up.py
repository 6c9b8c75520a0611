"""Start-up checks of process rewards: requirements on the engine, the trainer and the estimator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path

from ...correction import Problem
from ...correction.problem import set_to
from .prefix_scorer import find_unlike_pieces
from .settings import ProcessSettings

ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"
_HERE = __name__.rpartition(".")[0]
MANAGERS = {"v0": f"{_HERE}.manager.ScoringManagerV0", "v1": f"{_HERE}.manager_v1.ScoringManagerV1"}
"""Managers of agent loops, by verl's trainer."""
BY_TOKEN = ("gae", "reinforce_plus_plus")
"""verl's estimators that keep a per-token penalty per token."""
FEW = 10
"""Number of prefixes below which a rank correlation, whose standard error is about 1 / sqrt(n - 1), says nothing."""
TEXTS = ("3+3=1. So 1+2=3.", "Wait, x = 4.2!\n\nBut no", "naïve Übung", "数学 42")


def find_manager(config: DictConfig) -> str:
    """Find the manager of agent loops that scores rows for the run's trainer."""
    return MANAGERS[live_path(config).trainer]


def serve_scores() -> None:
    """Make vLLM replicas started by this process score prefixes."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> Any:
        from .scoring_server import ScoringReplica

        return ScoringReplica

    RolloutReplicaRegistry.register("vllm", load)


def find_problems(section: str, settings: ProcessSettings, config: DictConfig) -> Iterator[Problem]:
    """Find conflicts of the settings with the configuration."""
    parts = (section,)
    path = live_path(config)
    if not path.attributes.scores_prompts:
        reason = f"the rollout server of verl {path.release} drops vLLM's prompt_logprobs, which values are made of."
        fix = f"Use verl 0.8.0 or later, or set {section}=null."
        yield Problem(section, "on", reason, fix, parts=parts)
        return
    engine = OmegaConf.select(config, f"{ROLLOUT}.name")
    if engine != "vllm":
        key, reason = f"{ROLLOUT}.name", "values are requested from vLLM; other engines are not supported."
        fix = f"Set {key}=vllm, or {section}=null."
        yield Problem(key, engine, reason, fix, parts=parts, overrides=(set_to(key, "vllm"),))
    if OmegaConf.select(config, f"{ROLLOUT}.disaggregation.enabled"):
        key = f"{ROLLOUT}.disaggregation.enabled"
        reason = "a prefix is computed on one server and decoded on another, so neither has the prompt's log-probs."
        yield Problem(key, True, reason, f"Set {key}=false, or {section}=null.", parts=parts)
    manager = OmegaConf.select(config, MANAGER)
    if manager and manager not in MANAGERS.values():
        reason = f"sequences would bypass {section}, whose manager of agent loops scores them."
        fix = f"Set {MANAGER}=null, or {section}=null."
        yield Problem(MANAGER, manager, reason, fix, parts=parts)
    yield from _check_estimator(section, config)
    yield from _check_lengths(section, settings, config)
    if settings.monte_carlo.every is not None:
        yield from _check_monte_carlo(section, settings, config)
    key = "algorithm.filter_groups.enable"
    if OmegaConf.select(config, key):
        reason = f"it drops prompts without a passing rollout, in which only {section} could rank rollouts."
        yield Problem(key, True, reason, f"Set {key}=false, or {section}=null.", "NO-OP", parts)


def _check_estimator(section: str, config: DictConfig) -> Iterator[Problem]:
    parts = (section,)
    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    key = "algorithm.use_kl_in_reward"
    if OmegaConf.select(config, key) and estimator not in BY_TOKEN:
        reason = (
            f"algorithm.adv_estimator={estimator} sums the per-token penalty to one outcome, next to per-token credit."
        )
        fix = f"Set {key}=false and actor_rollout_ref.actor.use_kl_loss=true, which changes training."
        overrides = (set_to(key, False), set_to("actor_rollout_ref.actor.use_kl_loss", True))
        yield Problem(key, True, reason, fix, parts=parts, overrides=overrides)
    gamma = OmegaConf.select(config, "algorithm.gamma")
    if gamma not in (None, 1, 1.0):
        key, reason = "algorithm.gamma", "utilities telescope to V_m - V_0 only without a discount."
        yield Problem(key, gamma, reason, f"Set {key}=1.0, or {section}=null.", parts=parts)


def _check_monte_carlo(section: str, settings: ProcessSettings, config: DictConfig) -> Iterator[Problem]:
    parts, key, every = (section,), f"{section}.monte_carlo.every", settings.monte_carlo.every
    model, pool = "reward.reward_model.enable", "reward.reward_model.enable_resource_pool"
    if OmegaConf.select(config, model) and not OmegaConf.select(config, pool):
        reason = "a reward model on the trainer's devices scores after the rollouts, so continuations get no reward."
        yield Problem(key, every, reason, f"Set {key}=null, or {pool}=true.", parts=parts, alongside={model: True})
    turns = f"{ROLLOUT}.multi_turn.enable"
    if OmegaConf.select(config, turns):
        reason = "prefixes are continued without tools, and sequences with tool outputs are left out of the checks."
        yield Problem(key, every, reason, "", "NOTE", parts, alongside={turns: True})
    prompts, n = (int(OmegaConf.select(config, name) or 0) for name in ("data.train_batch_size", f"{ROLLOUT}.n"))
    rows = prompts * n
    expected = round(settings.monte_carlo.share * rows)
    if rows > 0 and expected < FEW:
        key = f"{section}.monte_carlo.share"
        reason = f"a check has about {expected} of {rows} sequences, too few for a rank correlation."
        fix = f"Set {key} to {min(1.0, FEW / rows):.2g} or more."
        yield Problem(key, settings.monte_carlo.share, reason, fix, "NOTE", parts)


def _check_lengths(section: str, settings: ProcessSettings, config: DictConfig) -> Iterator[Problem]:
    parts = (section,)
    tokenizer = _load_tokenizer(str(OmegaConf.select(config, "actor_rollout_ref.model.path")))
    forced = 0
    if tokenizer is None:
        reason = "the tokenizer is not available: whether its tokens decode one by one as together was not checked."
        yield Problem(section, "on", reason, "", "NOTE", parts)
    else:
        forced = len(tokenizer(settings.force_prompt, add_special_tokens=False)["input_ids"])
        if unlike := find_unlike_pieces(tokenizer, (*settings.markers, *TEXTS)):
            key, reason = (
                "actor_rollout_ref.model.path",
                f"tokens of {unlike!r} decode differently one by one than together.",
            )
            fix = f"Train a model with another tokenizer, or set {section}=null."
            value = OmegaConf.select(config, key)
            yield Problem(key, value, reason, fix, parts=parts)
    key = f"{ROLLOUT}.max_model_len"
    lengths = [OmegaConf.select(config, f"data.max_{part}_length") for part in ("prompt", "response")]
    most = OmegaConf.select(config, key)
    if most is None or None in lengths:
        return
    needed = sum(int(each) for each in lengths) + forced + settings.max_answer_tokens + 1
    if int(most) < needed:
        reason = f"prompt, response, force prompt and answer have up to {needed - 1} tokens, and one is decoded."
        yield Problem(key, most, reason, parts=parts, overrides=(set_to(key, needed),))


def _load_tokenizer(path: str) -> Any:
    """Load a tokenizer from this machine or its cache; None if it is not there."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None
