"""Counts of right answers from verl's validation dumps, the JSONL files of ``trainer.validation_data_dir``.

A line is a sample: ``input``, ``output``, ``gts``, ``score``, ``step``, and on the V1 trainer ``uid``, of the form
PROMPT_SESSION_OUTPUT; the outputs of a session have one score.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...extensions.sessions import round_threshold

Prompt = tuple[str, str]
"""Input and ground truth, which tell prompts apart."""
_ROUND = re.compile(r"round_\d+")
"""Folder of a further round of dynamic validation, inside that of the first round."""


class DumpError(ValueError):
    """A file that is no validation dump; names the line."""


@dataclass(frozen=True)
class Counts:
    """Samples and right ones of each prompt at one step.

    Attributes:
        step: of the trainer.
        n, c: of each prompt.
        pooled: prompts that stand more than once in the data set, as far as the dumps tell.
        named: the dumps tell prompts apart by uid.
        prompts: identity of each prompt.
        folder: of the dumps; empty if all dumps are of one folder.
    """

    step: int
    n: list[int]
    c: list[int]
    pooled: int
    named: bool
    prompts: list[Prompt]
    folder: str = ""

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return f"{self.folder}, step {self.step}" if self.folder else f"step {self.step}"


@dataclass
class _Prompt:
    scores: list[float] = field(default_factory=list)
    uids: Counter[tuple[str, str]] = field(default_factory=Counter)


def read_dumps(paths: Sequence[Path], *, correct_at_least: float) -> list[Counts]:
    """Read dumps, one ``Counts`` per folder and step: further rounds of dynamic validation add samples to its prompts.

    Prompts are told apart by input and ground truth. On the V1 trainer it is seen where a data set holds one twice.

    Raises:
        DumpError: a line that is none of a dump's.
        OSError: a file cannot be read.
    """
    steps: dict[tuple[str, int], dict[Prompt, _Prompt]] = {}
    named = True
    for path in paths:
        folder = str(path.parent.parent if _ROUND.fullmatch(path.parent.name) else path.parent)
        sessions: set[str] = set()
        for number, text in enumerate(path.read_text().splitlines(), 1):
            row = _parse(path, number, text)
            uid = row.get("uid")
            named &= uid is not None
            if uid is not None:
                session, _, _ = str(uid).rpartition("_")
                if session in sessions:
                    continue
                sessions.add(session)
            key = (str(row["input"]), json.dumps(row.get("gts"), sort_keys=True))
            prompt = steps.setdefault((folder, int(row["step"])), {}).setdefault(key, _Prompt())
            prompt.scores.append(float(row["score"]))
            if uid is not None:
                prompt.uids[str(path), session.rpartition("_")[0]] += 1
    if not steps:
        raise DumpError(f"{', '.join(map(str, paths))}: no sample in it.")
    several = len({folder for folder, _ in steps}) > 1
    return [
        _count(step, prompts, correct_at_least, named, folder if several else "")
        for (folder, step), prompts in sorted(steps.items())
    ]


def _count(step: int, of: Mapping[Prompt, _Prompt], correct_at_least: float, named: bool, folder: str) -> Counts:
    prompts = of.values()

    def is_pooled(prompt: _Prompt) -> bool:
        by_file = Counter(path for path, _ in prompt.uids)
        return any(count > 1 for count in by_file.values())

    return Counts(
        step,
        [len(prompt.scores) for prompt in prompts],
        [sum(score >= round_threshold(correct_at_least) for score in prompt.scores) for prompt in prompts],
        sum(map(is_pooled, prompts)),
        named,
        list(of),
        folder,
    )


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
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
    return row
