"""The verdicts on each configured correction of a launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.contract import PatchError
from verl_patches.execution_path import LivePath
from verl_patches.releases import TESTED

from ..correction import CorrectionSpec, Problem, SpecError
from ..correction.problem import EVERYTHING, MU, CheckError
from ..preflight.checks.readable import (
    find_former_actor,
    find_missing_actor,
    find_null_sections,
    find_pairs,
    find_unreadable_values,
    find_unresolved_interpolations,
)
from ..preflight.checks.run_keys import check_by_verl
from ..preflight.composed import REPLAY_PART as ROUTER_REPLAY
from ..preflight.composed import Composed
from ..preflight.examination import (
    REMARKS,
    VERL_CHECKS,
    ConfiguredPart,
    collect_problems,
    describe_verls_loss,
    examine,
    find_stray_overrides,
    list_parts,
)
from ..preflight.hydra_groups import brought_sections, read_task_overrides
from ..preflight.own_keys import find_similar_keys, list_groups, list_sections
from ..preflight.python_source import VERLS, check_program_trains, is_own
from .launch import compose
from .program import Launch, LaunchError
from .show import Diagnosis, VerdictRow

HOOKS = "recipe.offpolicy.trainer.hooked"
_BRING = (
    "Choose an option of this package, for example +correction@correction=tis_token; it adds the package's sections."
)


def diagnose(launch: Launch) -> Diagnosis:
    """Compose the launch's configuration and run every check and remark on it, without Ray."""
    found = _diagnose(launch)
    assumed = [Problem("", None, f"{each}.", "", "NOTE") for each in launch.assumed]
    found = replace(found, notes=(*found.notes, *assumed))
    if not launch.lost:
        return found
    problem = Problem("", None, *launch.explain_lost(), parts=("launch",))
    return replace(found, rows=(VerdictRow("launch", "overrides from --script", (problem,)), *found.rows))


def _diagnose(launch: Launch) -> Diagnosis:
    try:
        config = compose(launch)
        return judge(config, launch, read_task_overrides())
    except (LaunchError, PatchError, SpecError, CheckError) as error:
        return Diagnosis(launch, error=str(error))
    except OmegaConfBaseException as error:
        said = str(error).split("\n")[0]
        return Diagnosis(launch, error=f"{launch.module}: not a configuration of verl's PPO ({said}).")


def judge(config: DictConfig, launch: Launch, overrides: Sequence[str] = ()) -> Diagnosis:
    """Run the checks on a composed configuration and collect their verdicts.

    Args:
        overrides: overrides on the command line, including those that were added for this package's options.
    """
    if null := list(find_null_sections(config)):
        return Diagnosis(launch, rows=_arrange_rows((), null)[0])
    if not launch.ours and not brought_sections():
        return _judge_verl(Composed(config, CorrectionSpec()), launch, overrides)
    if missing := [*check_program_trains(launch.module), *find_missing_actor(config), *find_former_actor(config)]:
        return Diagnosis(launch, rows=_arrange_rows((), missing)[0])
    found = examine(config, overrides, own_main=is_own(launch.module))
    parts = list_parts(found.run) if found.spec is not None else ()
    rows, notes = _arrange_rows(parts, [*found.problems, *_note_program(launch)])
    fingerprint = None if found.spec is None or found.spec.is_none else found.spec.fingerprint()
    path, said = _find_path(found.run), found.said
    if not launch.ours and path is not None and not path.attributes.platforms:  # before 0.9 verl has no plugins
        said = (*said, f"The launch sets VERL_USE_EXTERNAL_MODULES={HOOKS} for all workers.")
    return Diagnosis(launch, path, rows, notes, said, fingerprint, headline=found.headline)


def _note_program(launch: Launch) -> Iterator[Problem]:
    if is_own(launch.module):
        reason = (
            "supported only if its trainer derives from verl's RayPPOTrainer or V1 PPOTrainer; otherwise the run stops "
            "at the first update."
        )
        yield Problem("module", launch.module, reason, "", "NOTE")


def _find_path(run: Composed) -> LivePath | None:
    try:
        return run.path
    except OmegaConfBaseException:  # an interpolation without a value, which is reported separately
        return None


def _judge_verl(run: Composed, launch: Launch, overrides: Sequence[str]) -> Diagnosis:
    """Judge a launch of a verl program without this package; only verl's own correction can be configured there."""
    config, where = run.config, run.path
    known = launch.module in VERLS
    problems = list(_take_unread(config, launch, overrides))
    found = (*find_similar_keys(overrides), *find_stray_overrides(config, overrides))
    for stray in {each.key: each for each in found}.values():
        ours = stray.fix.startswith("Write ")
        problems.append(replace(stray, fix=_add_group(stray.fix)) if ours else stray)
    problems += [*find_unresolved_interpolations(config), *find_pairs(overrides)]
    if known:
        problems += find_unreadable_values(config)
    else:
        reason = "this program has its own trainer, and the doctor did not check which keys it reads."
        fix = "Add a correction of this package instead, +correction@correction=tis_token for example."
        # Without a correction, this is only a note.
        problems.append(Problem("module", launch.module, reason, fix, "ERROR" if run.active else "NOTE"))
    if where.release not in TESTED:
        reason = f"the doctor did not check which keys this release reads; supported: {', '.join(TESTED)}."
        problems.append(Problem("verl", where.release, reason, "Install a supported release.", "NOTE"))
    read_otherwise = {problem.key for problem in problems}
    checked = collect_problems((*VERL_CHECKS, *REMARKS) if known else (), run)
    problems += [problem for problem in checked if problem.key not in read_otherwise]
    if known and not any(problem.verdict == "ERROR" for problem in problems):
        problems += collect_problems((check_by_verl,), run)
    rows, notes = _arrange_rows(list_parts(run), problems)
    said = f"{'' if run.active else f'UNCORRECTED: {launch.module} with '}{describe_verls_loss(run)}"
    return Diagnosis(launch, where, rows, notes, headline=said)


def _add_group(fix: str) -> str:
    """Adapt a fix to other programs: ``Write +opd@opd=loss`` instead of ``Write opd=loss``."""
    written = fix.removeprefix("Write ")
    group = written.partition("=")[0]
    return f"Write +{group}@{written}" if group in list_groups() else f"{_BRING} {fix}"


def _take_unread(config: DictConfig, launch: Launch, overrides: Sequence[str]) -> Iterator[Problem]:
    """Remove the keys of this package from a configuration that uses none of its options.

    Yields:
        A problem for each removed key that has a value.
    """
    fix = _BRING
    groups = {group for group in list_groups() if any(each.lstrip("+").startswith(f"{group}=") for each in overrides)}
    taken: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, sorted({*list_sections(), *groups})))
    for name in taken:
        plain = taken[name]
        with open_dict(config):
            del config[name]
        if plain is not None:
            yield Problem(name, plain, f"unused in {launch.module} without an option of this package.", fix, parts=())


def _arrange_rows(
    parts: Iterable[ConfiguredPart], problems: Iterable[Problem]
) -> tuple[tuple[VerdictRow, ...], tuple[Problem, ...]]:
    """Arrange problems into one row per part, rows for problems without a part, and notes."""
    parts = list(parts)
    rows = {part.name: VerdictRow(part.name, part.meaning) for part in parts}
    notes = []
    for problem in problems:
        if problem.verdict == "NOTE":
            notes.append(problem)
            continue
        concerned = [part.name for part in parts if _concerns(problem, part)]
        if not concerned:
            named = next(iter(problem.parts), "")
            own = problem.key or "correction"
            concerned = [own if named in ("", *EVERYTHING, *MU) else named]
        for name in concerned:
            row = rows.get(name, VerdictRow(name, ""))
            rows[name] = replace(row, problems=(*row.problems, problem))
    by_weight = {"ERROR": 0, "NO-OP": 1, "NOTE": 2}
    return tuple(
        replace(row, problems=tuple(sorted(row.problems, key=lambda each: by_weight[each.verdict])))
        for row in rows.values()
    ), tuple(notes)


def _concerns(problem: Problem, part: ConfiguredPart) -> bool:
    if problem.parts == EVERYTHING:
        return part.name != ROUTER_REPLAY
    return (problem.parts == MU and part.reads_mu) or part.name in problem.parts
