"""All start-up checks of a launch, shared by the launch, ``--check``, the doctor and the fork's smoke test.

Each check reads the composed configuration and yields problems that name the key, its value and the fix. ``CHECKS``
stop a launch; ``REMARKS`` report settings that are probably unintended but are not a reason to stop. ``examine`` runs
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_patches.contract import PatchError

from ..correction import CorrectionSpec, MaskSpec, Problem, SpecError, WeightSpec
from ..correction.problem import CheckError, format_value
from ..correction.spec import format_bounds
from ..extensions.add_on import list_registered
from .checks import base_loss, correction, path, rollout, run_keys, staleness, verl_correction
from .checks.readable import (
    find_null_sections,
    find_pairs,
    find_unreadable_values,
    find_unresolved_interpolations,
    substitute_usual_values,
)
from .composed import REPLAY_PART, SHADOW, SUPPORT_PART, Composed, name_part
from .hydra_groups import (
    compose_without,
    filter_added,
    find_lost_values,
    list_options,
    parse_overrides,
    restore_defaults,
)
from .own_keys import find_stray_keys, list_sections
from .resolve import Say, check_beside, check_fallbacks, refuse_emptied, resolve

Check = Callable[[Composed], Iterator[Problem]]
"""A function that yields the problems of a composed configuration."""
VERL_CHECKS: tuple[Check, ...] = (
    run_keys.check_engine_is_named,
    run_keys.check_choices,
    run_keys.check_resume,
    run_keys.check_folders,
    run_keys.check_numbers,
    verl_correction.check_trainer_mode,
    verl_correction.check_former_names,
    verl_correction.check_decoupled,
    verl_correction.check_bypass,
    verl_correction.check_legacy_mu,
    rollout.check_router_replay,
    verl_correction.check_misplaced,
    verl_correction.check_thresholds,
    rollout.check_logprobs_mode,
    rollout.check_sampling,
    rollout.check_agent_loops,
    base_loss.check_base_loss_of_verl,
)
"""Checks that also apply to verl's own correction, in launches of verl's programs and of ours."""
CHECKS: tuple[Check, ...] = (
    path.check_seams,
    path.check_path,
    path.check_program,
    path.check_lora,
    path.check_workers_env,
    staleness.check_own_keys,
    staleness.check_staleness,
    rollout.check_routing_replay,
    rollout.check_megatron_replay,
    rollout.check_model_runner,
    rollout.check_support,
    rollout.check_recorded_without_replay,
    correction.check_bounds,
    correction.check_parts,
    correction.check_proximal,
    correction.check_ppo_ratio,
    path.check_version_level,
    staleness.check_ages,
    correction.check_kl,
    correction.check_denominator,
    correction.check_baseline,
    rollout.check_rollout_log_probs,
    rollout.check_bucket,
    run_keys.check_micro_batches,
    verl_correction.check_not_both,
    correction.check_distillation,
    *VERL_CHECKS,
    base_loss.check_base_loss,
    staleness.check_extensions,
)
REMARKS: tuple[Check, ...] = (
    correction.warn_bounds_never_seen,
    correction.warn_level_version,
    correction.warn_wide_caps,
    correction.warn_short_answers,
    correction.warn_no_staleness,
    staleness.warn_verls_limit,
    staleness.warn_asynchronous,
    staleness.warn_ages,
    run_keys.warn_unlike_micro_batches,
    rollout.warn_one_seed,
    correction.warn_kl_left_out,
    correction.warn_collapsed_rewards,
    staleness.warn_extensions,
    path.warn_not_shown,
)

_RATIOS = {"rollout": "pi_old / mu", "full": "pi / mu", "ppo": "pi / pi_old"}


@dataclass(frozen=True)
class ConfiguredPart:
    """One part of a configured correction, with its own verdict.

    Attributes:
        name: name of the part, as in ``Problem.parts``.
        meaning: what is configured, in a few words.
        reads_mu: whether the part needs the rollout engine's log-probs.
        ours: True if this recipe's active correction uses the part; False for shadows, extensions and verl's own parts.
    """

    name: str
    meaning: str
    reads_mu: bool = True
    ours: bool = True


def list_parts(run: Composed) -> list[ConfiguredPart]:
    """List all configured parts: of our correction, its shadows, verl's own correction, and router replay."""
    spec, part = run.spec, ConfiguredPart
    parts = [part(key, describe_part(weight)) for key, weight in spec.all_weights.items()]
    for name, mask in spec.masks:
        parts.append(part(f"masks.{name}", describe_part(mask), mask.ratio != "ppo" and not mask.entry.of_age))
    if spec.proximal != "recompute":
        parts.append(part("proximal", f"pi_old: {spec.proximal}", spec.proximal != "reuse"))
    if spec.kl_clip is not None:
        band = format_bounds(dict(zip(("lower", "upper"), spec.kl_clip, strict=True)))
        parts.append(part("kl_clip", f"KL loss with pi / pi_old in {band}", reads_mu=False))
    if (weight := spec.kl_weight) is not None:
        capped = "" if weight.upper is None else f", {format_bounds({'upper': weight.upper})}"
        parts.append(part("kl_weight", f"KL loss times {_RATIOS[weight.ratio]}{capped}", weight.ratio == "full"))
    if (penalty := spec.penalty) is not None:
        meaning = f"{penalty.coefficient:g} times (log {_RATIOS[penalty.ratio]})^2"
        parts.append(part("penalty", meaning, penalty.ratio == "full"))
    for name, usual, meaning in (
        ("centering", None, f"expected score over the {spec.centering} likeliest tokens removed"),
        ("nonfinite", "counted", f"tokens without a finite mu {spec.nonfinite}"),
        ("denominator", "original", spec.denominator),
        ("baseline", "include", spec.baseline),
    ):
        if getattr(spec, name) != usual:
            parts.append(part(name, meaning))
    if (support := run.support) is not None:
        meaning = f"pi_old and pi over up to {support.size} tokens that could be sampled; else {support.unknown}"
        parts.append(part(SUPPORT_PART, meaning, ours=False))
    parts += [part(f"shadow.{name}", "reported, not applied", ours=False) for name in run.get(SHADOW) or ()]
    for key in run.active:
        bound = f"{key}_threshold"
        within = f", {bound}={format_value(run.verls[bound])}" if bound in run.verls else ""
        parts.append(part(name_part(key), f"verl's own, {format_value(run.verls[key])}{within}", ours=False))
    parts += [part(each.section, each.meaning, reads_mu=False, ours=False) for each in run.extensions]
    if asked := run.router_replay:
        parts.append(part(REPLAY_PART, asked, reads_mu=False, ours=False))
    return parts


def describe_part(part: WeightSpec | MaskSpec) -> str:
    """Describe a weight or a mask in a few words."""
    when = "" if part.when == "any" else f", {part.when}"
    if isinstance(part, MaskSpec) and part.entry.of_age:
        return f"{part.level}, at most {part.upper:g} versions old{when}"
    factors = (
        ""
        if part.by_staleness is None
        else (f", |log bound| multiplied by {format_value(list(part.by_staleness))} by age")
    )
    if part.by_position is not None:
        factors = f", |log bound| multiplied by position^{part.by_position:g}"
    names = ("lower", "upper", "delta", "budget")
    bounds = format_bounds({name: getattr(part, name) for name in names if hasattr(part, name)})
    kind = "" if isinstance(part, WeightSpec) and part.aggregate == "product" else f" {part.aggregate}"
    if isinstance(part, WeightSpec):
        bounds = f"power={part.power:g} rate={part.rate:g}" if part.kind == "gamma" else bounds
        kind = f"{kind and f'{kind},'} {part.kind}"
    return f"{part.level},{kind} {bounds} on {_RATIOS[part.ratio]}{when}{factors}"


_UNREAD = "correction: not readable, so nothing would be trained"
_UNREADABLE = (OmegaConfBaseException, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that a check may raise on a value that it cannot read."""


@dataclass(frozen=True)
class Preflight:
    """The result of the start-up checks.

    Attributes:
        run: the configuration as the checks read it.
        spec: the correction to train with; None if it could not be read.
        options: the chosen options of the group ``correction``.
        problems: ERROR stops the launch; NO-OP means that a setting has no effect; all other problems are notes.
        said: lines about choices that were made automatically, for example by ``correction=auto``.
        headline: which correction is on, or UNCORRECTED.
    """

    run: Composed
    spec: CorrectionSpec | None
    options: tuple[str, ...]
    problems: tuple[Problem, ...]
    said: tuple[str, ...]
    headline: str

    @property
    def stopping(self) -> tuple[Problem, ...]:
        """Problems that stop the launch."""
        return tuple(problem for problem in self.problems if problem.verdict == "ERROR")

    @property
    def remarks(self) -> tuple[Problem, ...]:
        """Problems that are reported but do not stop the launch."""
        return tuple(problem for problem in self.problems if problem.verdict != "ERROR")


def examine(
    config: DictConfig, overrides: Iterable[str], *, say: Say = lambda line: None, own_main: bool = False
) -> Preflight:
    """Resolve the configuration in place and run every check, inside the Hydra application that composed it.

    Args:
        config: configuration composed from a primary configuration with our sections.
        overrides: overrides on the command line.
        say: called with the headline and with each choice as soon as it is known.
        own_main: whether the launched program is the user's own; its code may register choices with verl.
    """
    overrides = list(overrides)
    # Every other check would fail on a null section.
    if null := list(find_null_sections(config)):
        return Preflight(Composed(config), None, (), tuple(null), (), _UNREAD)
    problems = [*find_unresolved_interpolations(config), *find_unreadable_values(config)]
    if any(problem.verdict == "ERROR" for problem in problems):
        # The other checks run on a copy with readable values for these keys.
        config = substitute_usual_values(config, [problem.key for problem in problems])
    run = Composed(config, own_main=own_main)
    problems += (pairs := list(find_pairs(overrides)))
    problems += find_stray_overrides(config, overrides)
    problems += find_lost_values(config, overrides)
    said: list[str] = []
    options, spec = [], None
    try:
        options = resolve(run, said.append)
        spec = run.spec
    except SpecError as error:
        # Bounds may cross because one of them is a pair that was read as a number; ``pairs`` reports this.
        if _get_section(error.problem) not in map(_get_section, pairs):
            problems.append(restore_defaults(_read_as_written(error.problem, overrides)))
    except CheckError as error:
        problems += error.problems
    except _UNREADABLE as error:
        problems.append(_build_unreadable("resolve", error))
    first = _UNREAD if spec is None else _format_headline(run, options)
    for line in (first, *said):
        say(line)
    if spec is not None:
        reported = {problem.key for problem in pairs}
        problems += [each for each in _check_around(run, options) if each.key not in reported]
    return Preflight(run, spec, tuple(options), tuple(dict.fromkeys(problems)), tuple(said), first)


def _read_as_written(problem: Problem, overrides: Sequence[str]) -> Problem:
    """Report a number as it was written, for example 0.5_5, because Hydra drops the underscore."""
    written = dict(each.lstrip("+").split("=", 1) for each in overrides if "=" in each).get(problem.key, "")
    return replace(problem, value=written.strip()) if "_" in written and not isinstance(problem.value, str) else problem


def _get_section(problem: Problem) -> str:
    """Return the section that contains a problem's key."""
    return problem.key.rpartition(".")[0]


def _format_headline(run: Composed, options: Sequence[str]) -> str:
    """Format the line that names the active correction, or says UNCORRECTED."""
    chosen = f"correction={options[0] if len(options) == 1 else format_value(list(options))}"
    parts = list_parts(run)
    asked = ", ".join(f"{part.name} ({part.meaning})" for part in parts if part.ours)
    others = {SUPPORT_PART, *(each.section for each in run.extensions)}
    alongside = "".join(f"; {part.name} ({part.meaning})" for part in parts if part.name in others and not part.ours)
    if asked:
        return f"{chosen}: {asked}{alongside}"
    return f"UNCORRECTED: {chosen}, {describe_verls_loss(run)}{alongside}"


def describe_verls_loss(run: Composed) -> str:
    """Describe verl's own correction of the loss, or say that there is none."""
    return f"verl's own algorithm.rollout_correction: {', '.join(run.active)}" if run.active else "verl's own loss"


def _check_around(run: Composed, options: Sequence[str]) -> Iterator[Problem]:
    """Find the problems of a configuration whose correction is well formed."""
    found = list(_find_stopping(run))
    for step in (
        lambda: check_beside(run.spec, run.shadows),
        lambda: check_fallbacks(run, run_checks),
        lambda: refuse_emptied(run.spec, options),
    ):
        try:
            step()
        except SpecError as error:
            found.append(error.problem)
        except CheckError as error:
            found += error.problems
    yield from found or collect_problems((run_keys.check_by_verl,), run)
    yield from collect_problems(REMARKS, run)


def _find_stopping(run: Composed) -> Iterator[Problem]:
    """Find the problems that stop the launch; NO-OP problems become ERROR."""
    for problem in collect_problems(CHECKS, run):
        yield problem if problem.verdict == "NOTE" else replace(problem, verdict="ERROR")


def run_checks(run: Composed) -> None:
    """Run all checks on a resolved configuration.

    Raises:
        SpecError: the correction itself is malformed.
        CheckError: there are problems that stop a launch; the message lists all of them.
    """
    if stopping := [each for each in _find_stopping(run) if each.verdict == "ERROR"]:
        raise CheckError(stopping)


def collect_problems(checks: Iterable[Check], run: Composed) -> list[Problem]:
    """Run checks and collect their problems; a check that cannot read a value also counts as a problem."""
    problems: list[Problem] = []
    for check in checks:
        try:
            problems += check(run)
        except (PatchError, *_UNREADABLE) as error:
            problems.append(_build_unreadable(check.__name__, error))
    return problems


def _build_unreadable(check: str, error: Exception) -> Problem:
    said = str(error).strip().split("\n")[0] or type(error).__name__
    return Problem("", None, f"The check {check} cannot read the configuration: {said}.")


def find_stray_overrides(config: DictConfig, overrides: Sequence[str]) -> Iterator[Problem]:
    """Find overrides that add unused keys, in the Hydra application that composed them."""
    ours = tuple(f"++{section}." for section in list_sections())
    deleted = {each[1:].strip() for each in overrides if each.startswith("~")}
    given = [each for each in filter_added(overrides) if _get_key(each) not in deleted]
    if added := [each for each in given if not each.startswith(ours)]:
        # Overrides of added keys and of keys below them need the addition; a deleted key may have been added too.
        below = tuple(f"{_get_key(each)}." for each in added)
        left_out = [each for each in overrides if each.startswith("~") or f"{_get_key(each)}.".startswith(below)]
        base = compose_without([*filter_added(overrides), *left_out])
        yield from find_stray_keys(added, base, list_options(), list_registered(config))
    yield from _find_removals_of_nothing(overrides)


def _find_removals_of_nothing(overrides: Sequence[str]) -> Iterator[Problem]:
    """Find overrides that set a nonexistent mask or weight to null; Hydra would also reject deleting it with ``~``."""
    null = [each for each in parse_overrides(overrides) if not each.is_delete() and each.value() is None]
    for each in null:
        owner, _, name = each.key_or_group.rpartition(".")
        if owner not in ("correction.masks", "correction.weights"):
            continue
        parts = OmegaConf.select(compose_without([str(each.input_line)]), owner)
        if name not in (names := [str(part) for part in parts or ()]):
            fix = f"Name one of {', '.join(names)}, or leave it out." if names else "Leave it out."
            key = each.key_or_group
            yield Problem(key, None, "removes nothing: the chosen options have no such part.", fix, parts=())


def _get_key(override: str) -> str:
    return override.partition("=")[0].strip("+~ ")
