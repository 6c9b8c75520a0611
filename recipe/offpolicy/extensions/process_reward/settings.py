"""Settings of process rewards (the section ``process_reward``) and their start-up checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from omegaconf import DictConfig

from verl_patches.execution_path import live_path

from ...batch.declared_keys import Configured, Key, count, number
from ...correction import Problem
from ..setting_checks import SectionSettings, load_tokenizer
from .episodes import find_unlike_pieces

SECTION = "process_reward"
Normalize = Literal["zscore", "scale", "none"]


@dataclass(frozen=True)
class WasteSettings:
    """Settings of the penalty on wasted episodes; see ``ProcessSettings.waste``."""

    within: Annotated[float, number("a number of nats, 0 or more", 0)]
    penalty: Annotated[float, number("a number, 0 or more", 0)]


_CHECKED = ("monte_carlo.every", ...)


@dataclass(frozen=True)
class MonteCarloSettings:
    """Settings of the Monte-Carlo checks of values.

    Attributes:
        every: number of weight versions from one check to the next; None: never.
        share: fraction of the rows that are checked, each at one prefix.
        samples: number of rollouts from each prefix.
    """

    every: Annotated[int | None, count("a number of versions, 1 or more, or null", null=True)]
    share: Annotated[float, number("a share in (0, 1]", most=1, above=0, read_with=_CHECKED)]
    samples: Annotated[int, count("a number of rollouts, 1 or more", read_with=_CHECKED)]


def _are_markers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value)


Tokens = Annotated[int, count("a number of tokens, 1 or more")]


@dataclass(frozen=True)
class ProcessSettings(SectionSettings):
    """Settings of process rewards.

    Attributes:
        force_prompt: text that is inserted between a prefix and the answer.
        think_end: text before which episodes end; if empty, the whole response is reasoning.
        markers, max_tokens, max_episodes: see ``episodes.episode_ends``.
        max_answer_tokens: maximum number of tokens of the answer, tokenised together with the force prompt.
        max_answers: maximum number of alternative answers in the ground truth; the likeliest answer is used.
        floor: lower bound of a value, in nats.
        prefix_cache: with ``auto``, the engine may use its prefix cache if it reports the number of cached tokens; with
            ``off``, it may not.
        normalize: see ``utilities.normalize_utilities``.
        coef: factor of the process advantages.
        probe_every: number of steps from one check by the trainer to the next; None: only at the first steps.
        max_unscored_share: largest share of rows without values in a step.
        waste: ``penalty`` is subtracted from the normalised utility of each episode whose utility is within ``within``
            nats of 0.
        monte_carlo: see ``MonteCarloSettings``.
    """

    option = "process_reward/prefix_value"
    force_prompt: Annotated[str, Key(lambda value: isinstance(value, str) and value != "", "a text")]
    think_end: Annotated[str, Key(lambda value: isinstance(value, str), "a text, which may be empty")]
    markers: Annotated[Sequence[str], Key(_are_markers, "a list of texts, none of them empty")]
    max_tokens: Tokens
    max_episodes: Annotated[int, count("a number of episodes, 1 or more")]
    max_answer_tokens: Tokens
    max_answers: Annotated[int, count("a number of answers, 1 or more")]
    floor: Annotated[float, number("a number of nats below 0", below=0)]
    prefix_cache: Literal["auto", "off"]
    normalize: Normalize
    coef: Annotated[float, number("a number above 0", above=0)]
    probe_every: Annotated[int | None, count("a number of steps, 1 or more, or null", null=True)]
    max_unscored_share: Annotated[float, number("a share in [0, 1)", 0, below=1)]
    waste: WasteSettings
    monte_carlo: MonteCarloSettings


ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"
_HERE = __name__.rpartition(".")[0]
MANAGERS = {"v0": f"{_HERE}.manager.ScoringManagerV0", "v1": f"{_HERE}.manager_v1.ScoringManagerV1"}
"""Maps verl's trainer to the agent loop manager for it."""
BY_TOKEN = ("gae", "reinforce_plus_plus")
"""Estimators of verl that keep a per-token penalty at its token instead of summing it over the row."""
FEW = 10
"""Minimum number of prefixes for a meaningful rank correlation, whose standard error is about 1 / sqrt(n - 1)."""
TEXTS = ("3+3=1. So 1+2=3.", "Wait, x = 4.2!\n\nBut no", "naïve Übung", "数学 42")


def find_manager(config: DictConfig) -> str:
    """Find the agent loop manager that scores rows for the run's trainer."""
    return MANAGERS[live_path(config).trainer]


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
        reason = "the server that decodes a prefix has not computed it, so it has no log-probs of the prompt."
        yield run.problem(key, reason, f"Set {key}=false, {off}")
    if (manager := run.get(MANAGER)) and manager not in MANAGERS.values():
        reason = f"sequences would bypass the agent loop manager of {section}, which scores them."
        yield run.problem(MANAGER, reason, f"Set {MANAGER}=null, {off}")
    estimator, key = run.get("algorithm.adv_estimator"), "algorithm.use_kl_in_reward"
    if run.get(key) and str(estimator) not in BY_TOKEN:
        reason = f"algorithm.adv_estimator={estimator} sums the KL penalty of all tokens to one outcome."
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
        reason = f"a check covers about {expected} of {rows} sequences, too few for a rank correlation."
        fix = f"Set {key} to {min(1.0, FEW / rows):.2g} or more."
        yield run.problem(key, reason, fix, verdict="NOTE", value=settings.share)


def _check_lengths(section: str, settings: ProcessSettings, run: Configured) -> Iterator[Problem]:
    tokenizer, forced = load_tokenizer(str(run.get(key := "actor_rollout_ref.model.path"))), 0
    if tokenizer is None:
        reason = "the tokenizer is not available, so the texts of its tokens were not checked."
        yield run.problem(section, reason, verdict="NOTE", value="on")
    else:
        forced = len(tokenizer(settings.force_prompt, add_special_tokens=False)["input_ids"])
        if unlike := find_unlike_pieces(tokenizer, (*settings.markers, *TEXTS)):
            reason = f"decoding the tokens of {unlike!r} one by one gives a different text."
            yield run.problem(key, reason, f"Train a model with another tokenizer, or set {section}=null.")
    lengths = [run.get(f"data.max_{part}_length") for part in ("prompt", "response")]
    most = run.get(key := f"{ROLLOUT}.max_model_len")
    if most is None or None in lengths:
        return
    needed = sum(map(int, lengths)) + forced + settings.max_answer_tokens + 1
    if int(most) < needed:
        reason = f"prompt, response, force prompt and answer have up to {needed - 1} tokens, and one more is decoded."
        yield run.problem(key, reason, sets={key: needed})
