"""Start-up checks of process rewards: requirements on the engine, the trainer and the estimator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from verl_patches.execution_path import live_path

from ...batch.declared_keys import Configured
from ...correction import Problem
from ..setting_checks import load_tokenizer
from .prefix_scorer import find_unlike_pieces
from .settings import MonteCarloSettings, ProcessSettings

ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"
_HERE = __name__.rpartition(".")[0]
MANAGERS = {"v0": f"{_HERE}.manager.ScoringManagerV0", "v1": f"{_HERE}.manager_v1.ScoringManagerV1"}
"""Maps verl's trainer to the agent loop manager for it."""
BY_TOKEN = ("gae", "reinforce_plus_plus")
"""verl's estimators that do not sum a per-token penalty over the row."""
FEW = 10
"""Minimum number of prefixes for a meaningful rank correlation, whose standard error is about 1 / sqrt(n - 1)."""
TEXTS = ("3+3=1. So 1+2=3.", "Wait, x = 4.2!\n\nBut no", "naïve Übung", "数学 42")


def find_manager(config: DictConfig) -> str:
    """Find the agent loop manager that scores rows for the run's trainer."""
    return MANAGERS[live_path(config).trainer]


def serve_scores() -> None:
    """Make vLLM replicas started by this process score prefixes."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> Any:
        from .scoring_server import ScoringReplica

        return ScoringReplica

    RolloutReplicaRegistry.register("vllm", load)


def find_problems(section: str, settings: ProcessSettings, run: Configured) -> Iterator[Problem]:
    """Find conflicts between the settings and the configuration."""
    off, path = f"or {section}=null.", live_path(run.config)
    if not path.attributes.scores_prompts:
        reason = (
            f"the rollout server of verl {path.release} drops vLLM's prompt_logprobs, from which values are computed."
        )
        yield run.problem(section, reason, f"Use verl 0.8.0 or later, or set {section}=null.", value="on")
        return
    if run.get(key := f"{ROLLOUT}.name") != "vllm":
        reason = "values are requested from vLLM; other engines are not supported."
        yield run.problem(key, reason, f"Set {key}=vllm, {off}", {key: "vllm"})
    if run.get(key := f"{ROLLOUT}.disaggregation.enabled"):
        reason = "a prefix is computed on one server and decoded on another, so neither has the prompt's log-probs."
        yield run.problem(key, reason, f"Set {key}=false, {off}")
    if (manager := run.get(MANAGER)) and manager not in MANAGERS.values():
        reason = f"sequences would bypass the agent loop manager of {section}, which scores them."
        yield run.problem(MANAGER, reason, f"Set {MANAGER}=null, {off}")
    estimator, key = run.get("algorithm.adv_estimator"), "algorithm.use_kl_in_reward"
    if run.get(key) and str(estimator) not in BY_TOKEN:
        reason = (
            f"algorithm.adv_estimator={estimator} sums the per-token KL penalty to one outcome, but process rewards "
            "give credit per token."
        )
        fix = f"Set {key}=false and actor_rollout_ref.actor.use_kl_loss=true, which changes training."
        yield run.problem(key, reason, fix, {key: False, "actor_rollout_ref.actor.use_kl_loss": True})
    if run.get(key := "algorithm.gamma") not in (None, 1):
        reason = "utilities telescope to V_m - V_0 only without a discount."
        yield run.problem(key, reason, f"Set {key}=1.0, {off}")
    yield from _check_lengths(section, settings, run)
    if settings.monte_carlo.every is not None:
        yield from _check_monte_carlo(section, settings.monte_carlo, run)
    if run.get(key := "algorithm.filter_groups.enable"):
        reason = f"the filter drops prompts without a passing rollout, although {section} could rank their rollouts."
        yield run.problem(key, reason, f"Set {key}=false, {off}", verdict="NO-OP")


def _check_monte_carlo(section: str, settings: MonteCarloSettings, run: Configured) -> Iterator[Problem]:
    key, every = f"{section}.monte_carlo.every", settings.every
    pool = "reward.reward_model.enable_resource_pool"
    if run.get(model := "reward.reward_model.enable") and not run.get(pool):
        reason = "a reward model on the trainer's devices scores after the rollouts, so continuations get no reward."
        yield run.problem(key, reason, f"Set {key}=null, or {pool}=true.", value=every, alongside=[model])
    if run.get(turns := f"{ROLLOUT}.multi_turn.enable"):
        reason = "prefixes are continued without tools, and sequences with tool outputs are left out of the checks."
        yield run.problem(key, reason, verdict="NOTE", value=every, alongside=[turns])
    rows = int(run.get("data.train_batch_size") or 0) * int(run.get(f"{ROLLOUT}.n") or 0)
    expected = round(settings.share * rows)
    if rows > 0 and expected < FEW:
        key = f"{section}.monte_carlo.share"
        reason = f"a check has about {expected} of {rows} sequences, too few for a rank correlation."
        fix = f"Set {key} to {min(1.0, FEW / rows):.2g} or more."
        yield run.problem(key, reason, fix, verdict="NOTE", value=settings.share)


def _check_lengths(section: str, settings: ProcessSettings, run: Configured) -> Iterator[Problem]:
    tokenizer, forced = load_tokenizer(str(run.get(key := "actor_rollout_ref.model.path"))), 0
    if tokenizer is None:
        reason = (
            "the tokenizer is not available, so it was not checked whether its tokens decode to the same text "
            "one by one and together."
        )
        yield run.problem(section, reason, verdict="NOTE", value="on")
    else:
        forced = len(tokenizer(settings.force_prompt, add_special_tokens=False)["input_ids"])
        if unlike := find_unlike_pieces(tokenizer, (*settings.markers, *TEXTS)):
            reason = f"the tokens of {unlike!r} decode to different texts one by one and together."
            yield run.problem(key, reason, f"Train a model with another tokenizer, or set {section}=null.")
    lengths = [run.get(f"data.max_{part}_length") for part in ("prompt", "response")]
    most = run.get(key := f"{ROLLOUT}.max_model_len")
    if most is None or None in lengths:
        return
    needed = sum(map(int, lengths)) + forced + settings.max_answer_tokens + 1
    if int(most) < needed:
        reason = f"prompt, response, force prompt and answer have up to {needed - 1} tokens, and one more is decoded."
        yield run.problem(key, reason, sets={key: needed})
