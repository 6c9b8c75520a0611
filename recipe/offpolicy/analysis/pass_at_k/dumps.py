"""Counts of right answers from verl's validation dumps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...extensions.sessions import round_threshold
from ...extensions.validation_dumps import DumpError, find_run, name_runs, parse_line

Prompt = tuple[str, str]
"""Input and ground truth, which tell prompts apart."""


@dataclass(frozen=True)
class Counts:
    """Samples and right ones of each prompt at one step.

    Attributes:
        step: of the trainer.
        n, c: of each prompt.
        pooled: prompts that stand more than once in the data set, as far as the dumps tell.
        named: the dumps tell prompts apart by uid.
        prompts: identity of each prompt.
        run: the name of the dumps' folder, see ``validation_dumps.name_runs``.
    """

    step: int
    n: list[int]
    c: list[int]
    pooled: int
    named: bool
    prompts: list[Prompt]
    run: str = ""

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return f"{self.run}step {self.step}"


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
        folder = find_run(path)
        sessions: set[str] = set()
        for number, text in enumerate(path.read_text().splitlines(), 1):
            row = parse_line(path, number, text)
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
    runs = name_runs(folder for folder, _ in steps)
    return [
        _count(step, prompts, correct_at_least, named, runs[folder])
        for (folder, step), prompts in sorted(steps.items())
    ]


def _count(step: int, of: Mapping[Prompt, _Prompt], correct_at_least: float, named: bool, run: str) -> Counts:
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
        run,
    )
