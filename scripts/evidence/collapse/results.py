"""The committed results: Parquet files with one row for each step of each run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

DATA = Path(__file__).resolve().parent / "results.parquet"
"""Results of the whole runs."""
IN_PROCESS = DATA.with_name("results_in_process.parquet")
OTHER_START = DATA.with_name("results_in_process_other_start.parquet")
"""Results of in-process runs that began with the weights of another warm start; no verdict uses them."""
START_WEIGHTS = DATA.with_name("start_weights.safetensors")

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


def read(path: Path = DATA) -> pandas.DataFrame:
    """Read results; the table is empty if nothing has been run."""
    if path.exists():
        return pandas.read_parquet(path)
    return pandas.DataFrame(columns=["arm", "seed", "outcome", "wall_seconds", "step", *COLUMNS])


def append(
    run: Mapping[str, Any],
    records: Sequence[tuple[int, Mapping[str, Any]]],
    path: Path,
    columns: Mapping[str, str] = COLUMNS,
) -> None:
    """Add one run; the file is replaced atomically, so that a killed process loses at most that run.

    Args:
        run: values that are equal in all rows: ``arm``, ``seed``, ``outcome`` ("finished", or how it died), ...
        records: pairs of a step and the line that verl's file logger wrote; that logger writes NaN as null.
        columns: column of the results -> verl's metric.
    """
    rows = [{**run, "step": step, **{name: data.get(key) for name, key in columns.items()}} for step, data in records]
    whole = pandas.DataFrame(rows).astype(dict.fromkeys(("wall_seconds", *columns), "float32"))
    if path.exists():
        whole = pandas.concat([read(path), whole], ignore_index=True)
    partly = path.with_suffix(".partly")
    whole.to_parquet(partly, index=False, compression="zstd", compression_level=19)
    os.replace(partly, path)


def describe_finished(path: Path = DATA) -> dict[tuple[str, int], str]:
    """Describe, by arm and seed, how each run that need not be repeated ended, and how long it took."""
    runs = read(path).drop_duplicates(["arm", "seed"])[["arm", "seed", "outcome", "wall_seconds"]]
    return {(str(arm), int(seed)): f"{outcome} in {seconds:.0f} s" for arm, seed, outcome, seconds in runs.to_numpy()}
