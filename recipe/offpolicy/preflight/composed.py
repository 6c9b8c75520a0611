"""The composed configuration, parsed once for all checks, and the names of keys that several checks use."""

from __future__ import annotations

import difflib
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import (
    FULLY_ASYNC,
    ONE_STEP_OFF,
    USE_V1,
    LivePath,
    count_prompts,
    find_program_mode,
    live_path,
)

from ..batch.declared_keys import Configured
from ..correction import CorrectionSpec, SpecError
from ..correction.correction_parts import Proximal
from ..correction.dialects.verl import VERL_DEFAULTS
from ..correction.problem import format_value
from ..extensions.add_on import Extension, load_extensions
from ..replay.batch_routes import RECORDED, ReplaySettings
from ..staleness.staleness_settings import ETA, StalenessSettings
from ..support.support_settings import CENTERING, SUPPORT, SupportSettings
from .model_files import describe_noise

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ENGINE, MEGATRON, FSDP = f"{ROLLOUT}.engine_kwargs.vllm", f"{ACTOR}.megatron", f"{ACTOR}.fsdp_config"
NAME, MU_KEY, BACKEND = f"{ROLLOUT}.name", f"{ROLLOUT}.calculate_log_probs", f"{ROLLOUT}.checkpoint_engine.backend"
MINI_BATCH, BATCH = f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"
LOSS_MODE, KL_LOSS = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.use_kl_loss"
KL_IN_REWARD, ESTIMATOR = "algorithm.use_kl_in_reward", "algorithm.adv_estimator"
VERL, BYPASS = "algorithm.rollout_correction", "bypass_mode"
PROXIMAL, SHADOW, SUPPORT_PART = "correction.proximal", "offpolicy.shadow", "support"
MODE, ASYNC_MODES = "trainer.v1.trainer_mode", ("separate_async", "colocate_async")
UNTESTED_ENGINES = ("sglang", "trtllm")
"""verl's rollout engines that return log-probs but have not been tested here."""
OUTCOME = (
    *("gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo"),
    *("reinforce_plus_plus_baseline", "rloo", "rloo_vectorized"),
)
"""verl's advantage estimators that begin by summing each row's rewards."""
WITHOUT_PI_OLD = (*OUTCOME, "gae", "reinforce_plus_plus", "remax")
"""Estimators that do not read log pi_old; estimators that are not listed may read anything."""


AUTO = "auto"
"""Value of ``correction.proximal`` that means ``reuse`` if that is exact, and otherwise ``recompute``."""
VERLS_LOOPS = ("single_turn_agent", "tool_agent")
"""Agent loops that verl registers itself: they return log-probs, and one row for each sample."""
REPLAY_PART = "router_replay"
"""The name under which routing replay is reported, wherever it is set."""


class Composed(Configured):
    """A composed configuration and the values that the checks read from it, each read once.

    Args:
        config: the launch's configuration; its ``auto`` choices are resolved before ``spec`` is read.
        spec: the correction, if it differs from the configured one.
        own_main: whether the launched program is the user's own.
    """

    def __init__(self, config: DictConfig, spec: CorrectionSpec | None = None, *, own_main: bool = False) -> None:
        super().__init__(config)
        self.own_main = own_main
        if spec is not None:
            self.spec = spec

    @cached_property
    def spec(self) -> CorrectionSpec:
        """The configured correction.

        Raises:
            SpecError: the correction is malformed.
        """
        return CorrectionSpec.from_mapping(read_correction(self))

    @cached_property
    def registrar(self) -> str:
        """The user's code that may register choices with verl after the checks; "" if there is none."""
        given = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
        given += [each.value for each in entry_points(group="verl.plugins")]
        given.append(self.get(f"{MODEL}.external_lib") or "")
        modules = [name for name in given if name and not name.startswith(("verl_patches.", "recipe.offpolicy."))]
        return ", ".join(modules) or ("the program's own code" if self.own_main else "")

    @cached_property
    def shadows(self) -> dict[str, CorrectionSpec]:
        """The shadow corrections, by name, of a configuration that ``resolve`` has already processed."""
        node = self.get(SHADOW)
        values = OmegaConf.to_container(node, resolve=True) if node else {}
        if not isinstance(values, dict):
            reason = "names of options that main_offpolicy has not replaced with their values."
            raise SpecError(reason, key=SHADOW, value=values)
        return {str(name): CorrectionSpec.from_mapping(each) for name, each in values.items()}

    @cached_property
    def extensions(self) -> tuple[Extension, ...]:
        """The extensions that are on.

        Raises:
            CheckError: an extension is not available, or its settings are malformed.
        """
        return load_extensions(self.config)

    @cached_property
    def path(self) -> LivePath:
        """The path of the run: the release, the trainer and the worker."""
        return live_path(self.config)

    @cached_property
    def program(self) -> str | None:
        """The verl program if it is asynchronous by design; None for main_ppo and similar programs."""
        return find_program_mode(self.config)

    @cached_property
    def asynchronous(self) -> bool:
        """True if rollouts continue while the trainer updates."""
        return self.program is not None or (bool(self.get(USE_V1)) and self.get(MODE) in ASYNC_MODES)

    @cached_property
    def notes_token_versions(self) -> bool:
        """True if the rollout servers' client records each token's weight version."""
        return self.asynchronous and self.program != ONE_STEP_OFF and self.path.attributes.token_versions

    @cached_property
    def unknown_age(self) -> str | None:
        """Why token ages are unknown: no versions are recorded, or a version cannot be assigned to each token."""
        resumes = self.program != FULLY_ASYNC or bool(self.get("async_training.partial_rollout", default=True))
        several = self.asynchronous and self.program != ONE_STEP_OFF and resumes
        if self.unknown_versions is None and several and not self.notes_token_versions:
            said = (
                "several versions can sample a row, and recording the version of each token has not been tested "
                "with verl"
            )
            return f"{said} {self.path.release}."
        return self.unknown_versions and f"{self.unknown_versions[:-1]}, so token ages are unknown."

    @cached_property
    def unknown_versions(self) -> str | None:
        """Why the release does not record which weights sampled a row; None if it does."""
        if self.path.attributes.weight_versions:
            return None
        return f"verl {self.path.release} does not record which version of the weights sampled a row."

    @cached_property
    def steps(self) -> float:
        """Number of gradient steps per batch, computed from the configured sizes."""
        steps: float = count_prompts(self.config) / self.actor.ppo_mini_batch_size * self.actor.ppo_epochs
        return steps

    @property
    def actor(self) -> DictConfig:
        """The section of the actor."""
        actor: DictConfig = self.config.actor_rollout_ref.actor
        return actor

    @property
    def rollout(self) -> DictConfig:
        """The section of the rollout."""
        rollout: DictConfig = self.config.actor_rollout_ref.rollout
        return rollout

    @cached_property
    def staleness(self) -> StalenessSettings | None:
        """The staleness limit; None if verl's own keys apply."""
        return None if self.get(ETA) is None else StalenessSettings.from_config(self.config)

    @cached_property
    def replay(self) -> ReplaySettings | None:
        """Routing replay on FSDP; None if routes are not replayed."""
        return None if self.router_replay is None else ReplaySettings.from_config(self.config, self.path)

    @cached_property
    def support(self) -> SupportSettings | None:
        """Replay of the support of truncated sampling; None if supports are not replayed."""
        return None if self.get(SUPPORT) is None else SupportSettings.from_config(self.config)

    @cached_property
    def centering(self) -> SupportSettings | None:
        """Request for the likeliest tokens, for score centering; None if nothing is centred."""
        return None if self.get(CENTERING) is None else SupportSettings.for_centering(self.config)

    @cached_property
    def verls(self) -> dict[str, Any]:
        """The values of ``algorithm.rollout_correction``; empty if it is null."""
        return to_mapping(self.get(VERL))

    @cached_property
    def changed(self) -> dict[str, Any]:
        """Keys of ``algorithm.rollout_correction`` that differ from verl's defaults."""
        missing = object()
        return {k: v for k, v in self.verls.items() if k != "_target_" and v != VERL_DEFAULTS.get(k, missing)}

    @cached_property
    def active(self) -> tuple[str, ...]:
        """Which of verl's rollout_is, rollout_rs and bypass_mode are switched on."""
        return tuple(key for key in ("rollout_is", "rollout_rs", BYPASS) if self.verls.get(key) not in (None, False))

    @cached_property
    def replay_modes(self) -> dict[str, str]:
        """Maps each section under actor and reference that configures router replay to its mode."""
        found: dict[str, str] = {}
        for owner in (ACTOR, "actor_rollout_ref.ref"):
            for name in self.get(owner) or ():
                below = self.get(f"{owner}.{name}") if name != REPLAY_PART else None
                if name == REPLAY_PART or (isinstance(below, DictConfig) and REPLAY_PART in below):
                    key = f"{owner}.{name}" if name == REPLAY_PART else f"{owner}.{name}.{REPLAY_PART}"
                    found[key] = str(self.get(f"{key}.mode") or "disabled")
        return found

    @property
    def router_replay(self) -> str | None:
        """The first key that requests router replay, as ``key=value``; None if no key does."""
        asked = (f"{key}.mode={mode}" for key, mode in self.replay_modes.items() if mode != "disabled")
        return next(asked, f"{RECORDED}=true" if self.get(RECORDED) else None)

    @cached_property
    def needs_mu(self) -> bool:
        """True if any part of this package reads the rollout engine's log-probs."""
        return not self.spec.is_none or self.spec.support is not None or bool(self.get(SHADOW))


def list_micro_batch_keys(run: Composed) -> tuple[tuple[str, str], tuple[str, str]]:
    """List the pairs of keys that set pi's micro-batches (actor) and pi_old's (rollout)."""
    sizes = ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu")
    if run.actor.use_dynamic_bsz:
        sizes = ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu")
    return ("use_dynamic_bsz", "log_prob_use_dynamic_bsz"), sizes


def to_mapping(node: Any) -> dict[str, Any]:
    """Convert a node to a dict of plain values; empty if it is not a section."""
    values = OmegaConf.to_container(node, resolve=True) if node is not None else {}
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def copy_config(config: DictConfig) -> DictConfig:
    """Copy a configuration; for verl's configuration, pickle takes a sixth of the time of ``copy.deepcopy``."""
    copied: DictConfig = pickle.loads(pickle.dumps(config))
    return copied


def name_part(key: str) -> str:
    """Return the name under which a part of verl's own correction is reported."""
    return f"rollout_correction.{key}"


@dataclass(frozen=True)
class ProximalChoice:
    """The choice made for ``correction.proximal=auto``, and the reason.

    Attributes:
        proximal: ``reuse`` or ``recompute``.
        said: the reason, in one line; empty if there is no choice, as with several gradient steps per batch.
    """

    proximal: Literal["reuse", "recompute"]
    said: str = ""


def read_correction(run: Composed) -> Any:
    """Read the plain values under ``correction``, with ``proximal=auto`` resolved; None if there are none.

    Raises:
        SpecError: ``proximal`` has an unknown value.
    """
    node = run.config.get("correction")
    values: Any = None if node is None else OmegaConf.to_container(node, resolve=True)
    if not isinstance(values, dict) or "proximal" not in values:
        return values
    options = (AUTO, *get_args(Proximal))
    if (given := values["proximal"]) not in options:
        near = difflib.get_close_matches(str(given), options, 1)
        fix = f"Set one of {', '.join(options)}."
        raise SpecError("no such choice.", fix, key=PROXIMAL, value=given, proposed={PROXIMAL: (*near, AUTO)[0]})
    return values | {"proximal": choose_proximal(run).proximal} if given == AUTO else values


def choose_proximal(run: Composed) -> ProximalChoice:
    """Choose ``reuse`` or ``recompute`` for a run whose shadows and fallbacks are already resolved.

    With one gradient step per batch, pi_old would be computed with the same weights as that step. According to the
    sources of verl 0.7.1, 0.8.0, 0.9.0 and 0.9.1, for the V0 and V1 trainers, the FSDP engine and the legacy FSDP
    actor, the same function computes both log-probs, for the same rows in the same order, and in the same micro-batches
    if both passes have the same micro-batch settings. This function tests for every other possible difference between
    the log-probs, and treats anything unknown as a difference.
    """
    values: Any = OmegaConf.to_container(run.config.correction, resolve=True)
    values |= {"proximal": "recompute"}
    if _explain_refusal(values) or CorrectionSpec.from_mapping(values).is_none or not _has_one_step(run):
        return ProximalChoice("recompute")
    selects, step = f"{PROXIMAL}=auto selects", "a batch gets one gradient step"
    if why := next(_find_reasons(run, values), ""):
        return ProximalChoice("recompute", f"{selects} recompute, although {step}: {why}.")
    return ProximalChoice("reuse", f"{selects} reuse: {step}, whose own log-probs are pi_old.")


def check_one_mini_batch(spec: CorrectionSpec, config: DictConfig, rows: int) -> None:
    """Check that ``rows`` rows fill exactly one mini-batch, as ``reuse`` assumes; rollouts may return extra rows.

    Raises:
        SpecError: the batch makes several mini-batches.
    """
    expected = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    if spec.proximal == "reuse" and rows > expected:
        reason = (
            f"a batch of {rows} rows arrived, but a mini-batch has {expected} rows, so it makes several gradient "
            f"steps, and only the first starts at pi_old."
        )
        raise SpecError(reason, key=PROXIMAL, value="reuse", proposed={PROXIMAL: "recompute"})


def _has_one_step(run: Composed) -> bool:
    sizes = (count_prompts(run.config), run.get(MINI_BATCH), run.get(f"{ACTOR}.ppo_epochs"))
    return all(isinstance(size, int) and size > 0 for size in sizes) and run.steps == 1


def _find_reasons(run: Composed, values: Mapping[str, Any]) -> Iterator[str]:
    """Find reasons why a single gradient step may not start at pi_old; the cheapest checks come first."""
    if run.actor.strategy not in ("fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={run.actor.strategy}, for which reuse was not shown to be exact"
    v1 = run.program != FULLY_ASYNC and run.get(USE_V1)
    updates = run.get(f"trainer.v1.{run.get(MODE)}.parameter_sync_step") or 1 if v1 else 1
    if run.program == FULLY_ASYNC:
        updates = run.get("async_training.trigger_parameter_sync_step", 1)
    if updates != 1:
        yield f"pi_old is computed before the first of {updates} updates"
    # A user's agent loop may return several rows, which make several mini-batches.
    if v1 and (loop := run.get(f"{ROLLOUT}.agent.default_agent_loop")) not in VERLS_LOOPS:
        yield f"the agent loop {loop} may return several rows per sample"
    if (estimator := str(run.get(ESTIMATOR))) not in WITHOUT_PI_OLD:
        yield f"{ESTIMATOR}={estimator} may read pi_old"
    for asked, why in (
        (run.get(f"{ACTOR}.shuffle"), f"{ACTOR}.shuffle=true groups rows differently"),
        (run.router_replay, f"{run.router_replay}: routes of the two passes may differ"),
        (run.get(KL_IN_REWARD), "the KL in the reward reads pi_old"),
        (run.get(f"{ACTOR}.calculate_sum_pi_squared"), f"{ACTOR}.calculate_sum_pi_squared=true reads pi_old"),
        (run.active, "verl's own correction reads pi_old"),
        *((each.reads_old_log_prob, f"the extension {each.section} reads pi_old") for each in run.extensions),
    ):
        if asked:
            yield why
    yield from _find_correction_reasons(run, values)
    for ours, theirs in list_micro_batch_keys(run):
        trained, scored = run.actor.get(ours), run.rollout.get(theirs)
        if trained is None or trained != scored:
            yield f"{ROLLOUT}.{theirs}={scored} with {ACTOR}.{ours}={trained}: kernels may round differently"
    if noise := describe_noise(run.config):
        yield noise


def _find_correction_reasons(run: Composed, values: Mapping[str, Any]) -> Iterator[str]:
    if why := _explain_refusal({**values, "proximal": "reuse"}):
        yield why
    shadows = run.get(SHADOW) or ()
    for name in shadows:
        if not isinstance(shadows, DictConfig) or _explain_refusal({**to_mapping(shadows[name]), "proximal": "reuse"}):
            yield f"the shadow {name} may need pi_old"
    for name, alarm in (run.get("offpolicy.alarms") or {}).items():
        fallback = alarm.get("fallback") if isinstance(alarm, DictConfig) else None
        if fallback and (not isinstance(fallback, DictConfig) or fallback.correction.get("proximal") != "reuse"):
            yield f"the fallback of alarm {name} may need pi_old"


def _explain_refusal(values: Mapping[str, Any]) -> str:
    """Explain why the values do not form a valid correction; empty if they do."""
    try:
        CorrectionSpec.from_mapping(values)
    except SpecError as error:
        problem = error.problem
        return f"{problem.key}={format_value(problem.value)}" if problem.key else problem.reason
    return ""
