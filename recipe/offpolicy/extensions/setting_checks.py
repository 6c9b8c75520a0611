"""Base class of extension settings, which declares a section as a dataclass, and checks shared by extensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from ..batch.declared_keys import Configured, Key, Rule, Section, choice, flag
from ..correction import Problem, SpecError
from ..correction.decisions import GROUP_ESTIMATORS
from ..correction.problem import EVERYTHING, CheckError, Requirement, find_unmet

ROLLOUTS = "actor_rollout_ref.rollout.n"
REUSED = ("reuse", "bypass", "loglinear", "same_engine")
"""Values of ``correction.proximal`` for which no forward pass computes pi_old before the update."""
_OWN_ESTIMATE = (
    Requirement(
        "algorithm.adv_estimator", GROUP_ESTIMATORS, "it does not compute advantages from a group's rewards alone."
    ),
    Requirement("algorithm.use_kl_in_reward", (False,), "the extension reads rewards without the KL."),
    Requirement("length_penalty.place", ("after",), "it checks advantages that verl computes from lowered rewards."),
)
"""Requirements of an extension that replaces verl's estimator and computes a group's advantages from its rewards."""
_CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"


@dataclass(frozen=True)
class SectionSettings:
    """Base class of the settings of one section.

    A field's annotation declares the accepted values: a ``Literal`` lists choices, ``bool`` means true or false,
    another dataclass is a nested section, and ``Annotated`` contains a ``Key``.
    """

    option: ClassVar[str]
    """Config file, such as ``opd/advantage``, that sets all keys of the section."""
    needed: ClassVar[str] = ""
    """Key that has no default."""
    rules: ClassVar[Sequence[Rule]] = ()

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """Map each key of the section to its declaration."""
        return declare_keys(cls)

    @classmethod
    def read(cls, section: str, values: Any) -> dict[str, Any]:
        """Return the values of a section; missing keys get their values from ``option``.

        Raises:
            CheckError: keys are unknown, invalid, unused or contradictory; the message lists all of them.
            SpecError: the key in ``needed`` is missing.
        """
        shipped = _read_option(cls.option)
        if found := list(Section(section, shipped, cls.keys(), cls.rules).check(values)):
            raise CheckError(replace(problem, parts=EVERYTHING) for problem in found)
        if cls.needed and cls.needed not in values:
            key, default = f"{section}.{cls.needed}", cls.option.rpartition("/")[2]
            fix = f"Set {section}={default}, or another option of configs/{section}."
            raise SpecError("this key has no default.", fix, key=key, proposed={key: default})
        return {
            name: {**default, **(values.get(name) or {})} if isinstance(default, Mapping) else values.get(name, default)
            for name, default in shipped.items()
        }

    @classmethod
    def from_mapping(cls, section: str, values: Any) -> Self:
        """Build the settings from the values of the section.

        Raises:
            CheckError, SpecError: as ``read``.
        """
        return cls.build(cls.read(section, values))

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Self:
        """Build the settings from a complete mapping of values."""
        nested = {name: hint for name, hint in get_type_hints(cls).items() if is_dataclass(hint)}
        return cls(**values | {name: hint(**values[name]) for name, hint in nested.items()})  # type: ignore[operator]


def declare_keys(kind: type, prefix: str = "") -> dict[str, Key]:
    """Map each key that a dataclass declares to its ``Key``; nested keys are joined by dots."""
    hints, keys = get_type_hints(kind, include_extras=True), dict[str, Key]()
    for name in (field.name for field in fields(kind)):
        hint, full = hints[name], f"{prefix}{name}"
        if is_dataclass(hint):
            keys |= declare_keys(hint, f"{full}.")  # type: ignore[arg-type]
        elif get_origin(hint) is Literal:
            keys[full] = choice(*get_args(hint))
        elif hint is bool:
            keys[full] = flag()
        elif declared := getattr(hint, "__metadata__", None):
            keys[full] = declared[0]
    return keys


@cache
def _read_option(option: str) -> dict[str, Any]:
    """Read the values of an option."""
    shipped: Any = OmegaConf.to_container(OmegaConf.load(_CONFIG_DIR / f"{option}.yaml"))
    return dict(shipped)


def find_late_weights(section: str, run: Configured) -> Iterator[Problem]:
    """Find weights that the trainer cannot compute before the update, because they need pi or the advantages' signs."""
    off, key = f"or {section}=null.", "correction.proximal"
    if run.get(key) in REUSED:
        reason = f"pi_old is not computed before the update, so the weights that {section} needs are unknown."
        yield run.problem(key, reason, f"Set {key}=recompute, {off}", {key: "recompute"})
    if run.get(key := "correction.weight.ratio") not in (None, "rollout"):
        reason = f"this ratio needs pi, which is computed in the update, but {section} needs the weights before it."
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
    """List the files of the training data; they may not exist on this machine."""
    files = run.get("data.train_files")
    return [files] if isinstance(files, str) else list(map(str, files or []))


def read_train_column(run: Configured, column: str, rows: int | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Read a column from each training data file that is a local Parquet file.

    Unreadable files are skipped, because verl's loader reports them.

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
    """Load a tokenizer from a local path or the local cache; None if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def divides_by_std(run: Configured) -> bool:
    """Return True if verl's estimator divides by the standard deviation of a group's rewards."""
    by_std = run.get("algorithm.norm_adv_by_std_in_grpo")
    return run.get("algorithm.adv_estimator") in ("grpo", "grpo_vectorized") and by_std is not False
