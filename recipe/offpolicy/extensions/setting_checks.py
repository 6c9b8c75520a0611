"""Checks of an extension's section, whose values override those of the option that ships the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import OmegaConf

from ..batch.declared_keys import Configured, Key, Rule, Section
from ..correction import Problem, SpecError
from ..correction.decisions import GROUP_ESTIMATORS
from ..correction.problem import EVERYTHING, CheckError, Requirement, find_unmet

T = TypeVar("T")
ROLLOUTS = "actor_rollout_ref.rollout.n"
REUSED = ("reuse", "bypass", "loglinear", "same_engine")
"""Values of ``correction.proximal`` with which no forward pass computes pi_old before the update."""
_OWN_ESTIMATE = (
    Requirement(
        "algorithm.adv_estimator", GROUP_ESTIMATORS, "it does not compute advantages from a group's rewards alone."
    ),
    Requirement(
        "algorithm.use_kl_in_reward",
        (False,),
        "the KL is part of verl's rewards, but not of the rewards that the extension reads.",
    ),
    Requirement(
        "length_penalty.place",
        ("after",),
        "it checks the advantages that verl itself computes from the lowered rewards.",
    ),
)
"""Requirements of an extension that computes a group's advantages from rewards, instead of verl's estimator."""
_CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"


def build_settings(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass from nested values; fields may be dataclasses too."""
    nested = {name: hint for name, hint in get_type_hints(kind).items() if is_dataclass(hint)}
    return kind(**values | {name: hint(**values[name]) for name, hint in nested.items()})  # type: ignore[operator]


def read_values(
    section: str,
    values: Any,
    option: str,
    keys: Mapping[str, Key],
    rules: Sequence[Rule] = (),
    named: tuple[str, str, str] | None = None,
) -> dict[str, Any]:
    """Return the values of a section, with the values of ``option`` for missing keys.

    Args:
        option: the file that ships all keys, such as ``opd/advantage``.
        named: a key that has no default, with the reason and the fix to report if it is missing.

    Raises:
        CheckError: unknown keys, invalid values, unused keys and contradictions, all at once.
        SpecError: ``named`` is missing.
    """
    shipped = _read_option(option)
    if found := list(Section(section, shipped, keys, rules).check(values)):
        raise CheckError(replace(problem, parts=EVERYTHING) for problem in found)
    if named is not None and named[0] not in values:
        key = f"{section}.{named[0]}"
        raise SpecError(*named[1:], key=key, proposed={key: option.rpartition("/")[2]})
    return {
        name: {**default, **(values.get(name) or {})} if isinstance(default, Mapping) else values.get(name, default)
        for name, default in shipped.items()
    }


@cache
def _read_option(option: str) -> dict[str, Any]:
    """Read the values of an option; an empty mapping, which allows any keys, becomes null."""
    shipped: Any = OmegaConf.to_container(OmegaConf.load(_CONFIG_DIR / f"{option}.yaml"))
    return {
        name: {key: None if each == {} else each for key, each in value.items()} if isinstance(value, dict) else value
        for name, value in shipped.items()
    }


def find_late_weights(section: str, run: Configured) -> Iterator[Problem]:
    """Find corrections whose weights the trainer cannot compute before the update, because they need pi or signs."""
    off, key = f"or {section}=null.", "correction.proximal"
    if run.get(key) in REUSED:
        reason = f"pi_old is not computed before the update, so the weights that {section} needs are unknown."
        yield run.problem(key, reason, f"Set {key}=recompute, {off}", {key: "recompute"})
    if run.get(key := "correction.weight.ratio") not in (None, "rollout"):
        reason = f"this ratio needs pi, but {section} needs the weights before the update."
        yield run.problem(key, reason, f"Set {key}=rollout, {off}")
    for key in ("correction.weights", "correction.weight.when"):
        if (value := run.get(key)) and value != "any":
            reason = f"this setting is applied at the gradient step, but {section} needs the weights earlier."
            shown = list(value) if OmegaConf.is_config(value) else value
            yield run.problem(key, reason, f"Set one weight for all tokens, {off}", value=shown)


def find_no_groups(section: str, run: Configured) -> Iterator[Problem]:
    """Find conflicts with an extension that compares the rollouts of a group instead of using verl's estimator."""
    off = f"{section}=null"
    yield from find_unmet(_OWN_ESTIMATE, run.get, off, (section,))
    if count_rollouts(run) == 1:
        fix = f"Set {ROLLOUTS}=8, or {off}."
        yield run.problem(ROLLOUTS, "a rollout in a group of one has no sibling to compare with.", fix, verdict="NO-OP")


def count_rollouts(run: Configured) -> int:
    """Return the number of rollouts of each prompt."""
    return int(run.get(ROLLOUTS) or 1)


def list_train_files(run: Configured) -> list[str]:
    """List the files of the training data, which may be missing from this machine."""
    files = run.get("data.train_files")
    return [files] if isinstance(files, str) else list(map(str, files or []))


def read_train_column(run: Configured, column: str, rows: int | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Read a column from each training data file that is a local Parquet file.

    Files that cannot be read are left to verl's loader.

    Args:
        rows: number of rows to read from the start; None: all rows.

    Returns:
        Each file and its values; all values are None if the file does not have the column.
    """
    import pyarrow
    import pyarrow.parquet as pq

    for path in list_train_files(run):
        if not path.endswith(".parquet"):
            continue
        try:
            file = pq.ParquetFile(path)
            most = file.metadata.num_rows if rows is None else min(rows, file.metadata.num_rows)
            there = column in file.schema_arrow.names
            head = next(file.iter_batches(max(most, 1), columns=[column]), None) if there else None
        except (OSError, pyarrow.ArrowInvalid):
            continue
        yield path, [None] * most if head is None else head.column(0).to_pylist()


def load_tokenizer(path: str) -> Any:
    """Load a tokenizer from this machine or its cache; None if neither has it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def divides_by_std(run: Configured) -> bool:
    """Return True if verl's estimator divides by the standard deviation of a group's rewards."""
    by_std = run.get("algorithm.norm_adv_by_std_in_grpo")
    return run.get("algorithm.adv_estimator") in ("grpo", "grpo_vectorized") and by_std is not False
