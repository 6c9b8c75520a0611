"""The rollouts of a batch, with one entry per session, and verl's dumps of validation answers.

A line of a dump is one sample: ``input``, ``output``, ``gts``, ``score``, ``step``, and on the V1 trainer, ``uid`` in
the form PROMPT_SESSION_OUTPUT. All outputs of a session have the same score.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..proof.rewards import check_rewards
from .batch_view import BatchView


@dataclass(frozen=True)
class Sessions:
    """The S sessions of one batch.

    Attributes:
        of_row: (n,) int64, the session of each row.
        last: (S,) the last row of each session.
        uids: (S,) the group of each session.
        scores: (S,) float64, the raw score of each session's last row.
        tokens: (S,) float64, response tokens in all rows of each session, without tool tokens.
        truncated: (S,) bool, True if the session's last row has the maximum response length.
        silent: (S,) bool, sessions that ``baseline=exclude`` has rejected or left without siblings.
    """

    of_row: Tensor
    last: Tensor
    uids: Sequence[str]
    scores: Tensor
    tokens: Tensor
    truncated: Tensor
    silent: Tensor

    def find_right(self, at_least: float) -> Tensor:
        """Find the sessions whose score is at least ``at_least``, (S,) bool."""
        return self.scores >= round_threshold(at_least)

    def groups(self, *, with_silent: bool = False) -> dict[str, list[int]]:
        """Collect the sessions of each group, leaving out silent sessions unless ``with_silent`` is set."""
        found: dict[str, list[int]] = {}
        for session, (uid, silent) in enumerate(zip(self.uids, self.silent.tolist(), strict=True)):
            if with_silent or not silent:
                found.setdefault(uid, []).append(session)
        return found


def read_sessions(batch: BatchView, most_tokens: int | None = None) -> Sessions:
    """Read the sessions of a batch.

    Args:
        most_tokens: longest response, tool tokens included; None: nothing counts as truncated.

    Raises:
        RewardError: a row's score is not finite.
    """
    check_rewards(batch.scores, batch.uids, f"step {batch.step}")
    columns = batch.rows("response_mask", "responses")
    mask = columns["response_mask"].bool()
    names = list(batch.sessions)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_row = torch.tensor([numbers[name] for name in names], dtype=torch.int64)
    last = torch.zeros(len(numbers), dtype=torch.int64)
    last[of_row] = torch.arange(len(names))
    tokens = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, of_row, mask.sum(-1).double())
    silent = torch.zeros(len(names), dtype=torch.bool) if batch.silent is None else batch.silent.bool()
    ends = torch.tensor([len(response) for _, response in batch.token_ids]) if most_tokens else None
    uids = list(batch.uids)
    return Sessions(
        of_row=of_row,
        last=last,
        uids=[uids[row] for row in last.tolist()],
        scores=batch.scores.sum(-1)[last].double(),
        tokens=tokens,
        truncated=torch.zeros(len(numbers), dtype=torch.bool) if ends is None else ends[last] >= (most_tokens or 0),
        silent=silent[last],
    )


def round_threshold(at_least: float) -> float:
    """Round a threshold so that a float32 score of the same value reaches it: 0.9 becomes 0.89999998.

    Example:
        >>> round_threshold(1.0), round_threshold(0.9) < 0.9
        (1.0, True)
    """
    return min(at_least, float(torch.tensor(at_least, dtype=torch.float32)))


def identify_prompts(batch: BatchView, sessions: Sessions) -> list[str]:
    """Compute an identifier of each session's prompt that is stable over steps; verl draws a new uid at each step.

    The identifier is a hash of the prompt's token ids in the session's first row.
    """
    first = {number: row for row, number in reversed(list(enumerate(sessions.of_row.tolist())))}
    ids = batch.token_ids
    return [
        hashlib.blake2b(",".join(map(str, ids[first[number]][0])).encode(), digest_size=16).hexdigest()
        for number in range(len(sessions.last))
    ]


_ROUND = re.compile(r"round_\d+")


class DumpError(ValueError):
    """A file is not a validation dump; the message names the offending line."""


class Dumped(NamedTuple):
    """One answer: the texts of prompt and answer, the score, and the trainer's step."""

    prompt: str
    output: str
    score: float
    step: int


def find_run(path: Path) -> str:
    """Find the folder of a run's dumps: the file's folder, or its parent if it is ``round_N`` of dynamic validation."""
    return str(path.parent.parent if _ROUND.fullmatch(path.parent.name) else path.parent)


def name_runs(runs: Iterable[str]) -> dict[str, str]:
    """Name folders by the parts of their paths that differ, followed by a comma; a single folder needs no name.

    Example:
        >>> name_runs(["out/a/val", "out/b/val"]), name_runs(["out/a"])
        ({'out/a/val': 'a/val, ', 'out/b/val': 'b/val, '}, {'out/a': ''})
    """
    found = set(runs)
    shared = os.path.commonpath([os.path.abspath(run) for run in found])
    return {run: f"{os.path.relpath(run, shared)}, " if len(found) > 1 else "" for run in sorted(found)}


def drop_repeated(paths: Iterable[Path]) -> list[Path]:
    """Drop repeated files, because their answers would count twice."""
    found: dict[Path, Path] = {}
    for path in paths:
        found.setdefault(path.resolve(), path)
    return list(found.values())


def is_dump(path: Path) -> bool:
    """Return True if a file begins with a line of a dump."""
    if not path.is_file():
        return False
    with path.open("rb") as file, contextlib.suppress(ValueError):
        row = json.loads(file.readline())
        return isinstance(row, dict) and "input" in row and "score" in row
    return False


def read_lines(path: Path, kind: type[ValueError], fix: str) -> Iterator[tuple[int, Any]]:
    """Read a file of JSON lines as line numbers and values.

    Args:
        kind, fix: the error to raise if a line is not JSON, and the end of its message.

    Raises:
        OSError: the file cannot be read.
    """
    # The file is read as bytes, because str.splitlines also splits at characters that JSON allows within texts, such as
    # U+2028.
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise kind(f"{path}, line {number}: not JSON ({error}). {fix}") from error
            yield number, row


def read_dump(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a dump.

    Raises:
        DumpError: a line does not have the format of a dump.
        OSError: the file cannot be read.
    """
    fix = "Give files from trainer.validation_data_dir."
    for number, row in read_lines(path, DumpError, fix):
        missing = [name for name in ("input", "score", "step") if not isinstance(row, dict) or name not in row]
        if missing:
            raise DumpError(f"{path}, line {number}: no {', '.join(missing)}. {fix}")
        if not isinstance(row["score"], int | float) or not math.isfinite(row["score"]):
            raise DumpError(f"{path}, line {number}: the score {row['score']!r} is not a finite number.")
        if not isinstance(row["step"], int):
            raise DumpError(f"{path}, line {number}: the step {row['step']!r} is not a whole number.")
        yield row


def read_answers(path: Path) -> Iterator[Dumped]:
    """Read the answers of a dump: only the last output of each session.

    Raises:
        DumpError: a line does not have the format of a dump.
        OSError: the file cannot be read.
    """
    found: dict[str, Dumped] = {}
    for number, row in enumerate(read_dump(path)):
        uid = row.get("uid")
        session = str(number) if uid is None else str(uid).rpartition("_")[0]
        output = str(row.get("output", ""))
        found[session] = Dumped(str(row["input"]), output, float(row["score"]), row["step"])
    if not found:
        raise DumpError(f"{path}: no sample was found.")
    yield from found.values()


def read_pass_rates(path: Path, correct_at_least: float) -> dict[str, float]:
    """Read the accuracy on each prompt, keyed by the prompt's text.

    Raises:
        DumpError, OSError: as ``read_answers``.
    """
    least, scores = round_threshold(correct_at_least), dict[str, list[float]]()
    for answer in read_answers(path):
        scores.setdefault(answer.prompt, []).append(answer.score)
    return {prompt: sum(score >= least for score in each) / len(each) for prompt, each in scores.items()}
