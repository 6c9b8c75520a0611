"""verl's validation dumps, the JSONL files of ``trainer.validation_data_dir``.

A line is a sample: ``input``, ``output``, ``gts``, ``score``, ``step``, and on the V1 trainer ``uid``, of the form
PROMPT_SESSION_OUTPUT; the outputs of a session have one score.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .sessions import round_threshold

_ROUND = re.compile(r"round_\d+")


class DumpError(ValueError):
    """A file that is no validation dump; names the line."""


class Dumped(NamedTuple):
    """One answer: text of prompt and answer, score, and the trainer's step."""

    prompt: str
    output: str
    score: float
    step: int


def find_run(path: Path) -> str:
    """Find the folder of a run's dumps: that of the file, or its parent if it is ``round_N`` of dynamic validation."""
    return str(path.parent.parent if _ROUND.fullmatch(path.parent.name) else path.parent)


def name_runs(runs: Iterable[str]) -> dict[str, str]:
    """Name folders by what tells them apart, with a comma; one folder needs no name.

    Example:
        >>> name_runs(["out/a/val", "out/b/val"]), name_runs(["out/a"])
        ({'out/a/val': 'a/val, ', 'out/b/val': 'b/val, '}, {'out/a': ''})
    """
    found = set(runs)
    shared = os.path.commonpath([os.path.abspath(run) for run in found])
    return {run: f"{os.path.relpath(run, shared)}, " if len(found) > 1 else "" for run in sorted(found)}


def is_dump(path: Path) -> bool:
    """Return True if a file begins with a line of a dump."""
    if not path.is_file():
        return False
    with path.open() as file, contextlib.suppress(ValueError):
        row = json.loads(file.readline())
        return isinstance(row, dict) and "input" in row and "score" in row
    return False


def parse_line(path: Path, number: int, text: str) -> dict[str, Any]:
    """Parse one line.

    Raises:
        DumpError: it is none of a dump's.
    """
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DumpError(
            f"{path}, line {number}: not JSON ({error}). Name files of trainer.validation_data_dir."
        ) from error
    missing = [name for name in ("input", "score", "step") if not isinstance(row, dict) or name not in row]
    if missing:
        raise DumpError(f"{path}, line {number}: no {', '.join(missing)}. Name files of trainer.validation_data_dir.")
    if not isinstance(row["score"], int | float) or not math.isfinite(row["score"]):
        raise DumpError(f"{path}, line {number}: the score {row['score']!r} is not a finite number.")
    return dict(row)


def read_answers(path: Path) -> Iterator[Dumped]:
    """Read the answers of a dump; of the outputs of one session, the last one.

    Raises:
        DumpError: a line that is none of a dump's.
        OSError: the file cannot be read.
    """
    found: dict[str, Dumped] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        row = parse_line(path, number, text)
        uid = row.get("uid")
        session = str(number) if uid is None else str(uid).rpartition("_")[0]
        output = str(row.get("output", ""))
        found[session] = Dumped(str(row["input"]), output, float(row["score"]), int(row["step"]))
    if not found:
        raise DumpError(f"{path}: no sample in it.")
    yield from found.values()


def read_pass_rates(path: Path, correct_at_least: float) -> dict[str, float]:
    """Read the share of right answers to each prompt, by its text.

    Raises:
        DumpError, OSError: as ``read_answers``.
    """
    least, scores = round_threshold(correct_at_least), dict[str, list[float]]()
    for answer in read_answers(path):
        scores.setdefault(answer.prompt, []).append(answer.score)
    return {prompt: sum(score >= least for score in each) / len(each) for prompt, each in scores.items()}
