"""The committed results: Parquet files with one row for each step of each run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

DATA = Path(__file__).resolve().parent / "results.parquet"
"""Results of the whole runs."""
IN_PROCESS = DATA.with_name("results_in_process.parquet")
OTHER_START = DATA.with_name("results_in_process_other_start.parquet")
"""In-process results that start from the weights of another warm start; no verdict uses them."""
START_WEIGHTS = DATA.with_name("start_weights.safetensors")
MACHINE_FAILURES = DATA.with_name("machine_failures.csv")
"""Runs that the machine ended and that were therefore repeated once, one per line."""

COLUMNS = {
    "exact": "val-aux/reasoning_gym/spell_backward/exact/mean@1",
    "graded": "val-core/reasoning_gym/spell_backward/acc/mean@1",
    "reward": "critic/rewards/mean",
    "k3": "offpolicy/kl/k3",
    "ratio_ess": "offpolicy/rollout_ratio/ess",
    "kept": "offpolicy/keep/token_share",
    "weight_min": "offpolicy/weight/min",
    "weight_max": "offpolicy/weight/max",
    "staleness": "offpolicy/staleness/mean",
    "length": "response_length/mean",
    "entropy": "actor/entropy",
    "gradient_error": "offpolicy/live/gradient_error",
    "proved": "offpolicy/live/proved",
    "seconds": "timing_s/step",
}
"""Column -> verl's metric; NaN in steps that did not log the metric."""


def build_rows(
    run: Mapping[str, Any],
    records: Sequence[tuple[int, Mapping[str, Any]]],
    columns: Mapping[str, str] = COLUMNS,
) -> list[dict[str, Any]]:
    """Build a run's rows from its metrics, which are pairs of a step and the line that verl's file logger wrote.

    Args:
        run: columns that are equal in all rows: ``arm``, ``seed``, ``outcome`` ("finished", or how it died), ...
        columns: column of the results -> verl's metric.
    """
    return [
        {**run, "step": step, **{name: _number(data.get(key)) for name, key in columns.items()}}
        for step, data in records
    ]


def _number(value: float | None) -> float:
    """Convert a metric to a number; verl's file logger writes NaN as null."""
    return math.nan if value is None else float(value)


def read(path: Path | None = None) -> pandas.DataFrame:
    """Read the results, by default those of the whole runs; the table is empty if nothing has been run."""
    path = path or DATA
    if path.exists():
        return pandas.read_parquet(path)
    return pandas.DataFrame({name: [] for name in ("arm", "seed", "outcome", "step", *COLUMNS)})


def append(rows: Sequence[Mapping[str, Any]], path: Path | None = None) -> None:
    """Add the rows of one run; the file is replaced atomically, so that a killed process loses at most that run."""
    path = path or DATA
    whole = pandas.DataFrame(list(rows))
    whole = whole.astype(dict.fromkeys(whole.select_dtypes("float").columns, "float32"))
    if path.exists():
        whole = pandas.concat([read(path), whole], ignore_index=True)
    partly = path.with_suffix(".partly")
    whole.to_parquet(partly, index=False, compression="zstd", compression_level=19)
    os.replace(partly, path)


def note_machine_failure(run: Mapping[str, Any], path: Path | None = None) -> bool:
    """Record a run that the machine ended; return True if it may be repeated once, False if it was recorded before."""
    path = path or MACHINE_FAILURES
    line = pandas.DataFrame([dict(run)])
    if path.exists():
        noted = pandas.read_csv(path)
        if ((noted["arm"] == run["arm"]) & (noted["seed"] == run["seed"])).any():
            return False
        line = pandas.concat([noted, line], ignore_index=True)
    line.to_csv(path, index=False)
    return True


def describe_finished(path: Path | None = None) -> dict[tuple[str, int], str]:
    """Describe, by arm and seed, how each run that need not be repeated ended, and how long it took."""
    found = read(path)
    if found.empty:
        return {}
    first = found.groupby(["arm", "seed"])[["outcome", "wall_seconds"]].first()
    return {
        (str(arm), int(seed)): f"{outcome} in {seconds:.0f} s" for (arm, seed), outcome, seconds in first.itertuples()
    }
