"""Answers from verl's validations: dumps, pass rates of prompts, and easy and hard prompts fixed at an early step.

Each line of a dump is one sample with ``input``, ``output``, ``gts``, ``score``, ``step`` and, with the V1 trainer,
``uid`` in the form PROMPT_SESSION_OUTPUT. All outputs of a session have the same score.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..proof.verify import LivenessError
from .batch_view import round_threshold

_ROUND = re.compile(r"round_\d+")


class DumpError(ValueError):
    """A file is not a validation dump; the message names the offending line."""


class Dumped(NamedTuple):
    """One answer: the prompt's text, the answer's text, the score, and the trainer's step."""

    prompt: str
    output: str
    score: float
    step: int


def find_run(path: Path) -> str:
    """Find the folder of a run's dumps: the file's folder, or its parent if the folder is a ``round_N``."""
    return str(path.parent.parent if _ROUND.fullmatch(path.parent.name) else path.parent)


def name_runs(runs: Iterable[str]) -> dict[str, str]:
    """Name each folder by the part of its path that differs, followed by a comma; a single folder gets no name.

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
    """Read a file of JSON lines; yield line numbers and values.

    Args:
        kind, fix: class of the error to raise if a line is not JSON, and the advice at the end of its message.

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
        try:
            fits = "input" in row and math.isfinite(row["score"]) and isinstance(row["step"], int)
        except (KeyError, TypeError):
            fits = False
        if not fits:
            raise DumpError(
                f"{path}, line {number}: expected input, a finite score and a step, not {row!r:.200}. {fix}"
            )
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
        DumpError, OSError: as for ``read_answers``.
    """
    least, scores = round_threshold(correct_at_least), dict[str, list[float]]()
    for answer in read_answers(path):
        scores.setdefault(answer.prompt, []).append(answer.score)
    return {prompt: sum(score >= least for score in each) / len(each) for prompt, each in scores.items()}


CLASSES = ("easy", "hard")
OTHER = "other"
_HOOK = "_maybe_log_val_generations"
"""Method to which every trainer of verl 0.7.1 to 0.9.1 passes all texts and scores of each validation."""


class Answer(NamedTuple):
    """One sampled answer: its prompt's text, its response tokens, and whether it is correct."""

    prompt: str
    tokens: int
    right: bool


class Followed(NamedTuple):
    """Answers to one class of prompts: number of prompts, mean pass rate, and mean number of tokens."""

    prompts: int
    pass_rate: float
    tokens: float


def group_answers(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Collect the answers to each prompt."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.prompt, []).append(answer)
    return found


def fix_classes(
    answers: Sequence[Answer], *, samples: int, easy_above: float = 0.9, hard_below: float = 0.1
) -> dict[str, str]:
    """Classify each prompt with at least ``samples`` answers as easy, hard or other, by its share of correct answers.

    Example:
        >>> answers = [Answer("a", 5, True)] * 10 + [Answer("b", 9, False)] * 10 + [Answer("c", 7, True)]
        >>> fix_classes(answers, samples=2)
        {'a': 'easy', 'b': 'hard'}
    """
    classes = {}
    for prompt, found in group_answers(answers).items():
        if len(found) < samples:
            continue
        share = sum(answer.right for answer in found) / len(found)
        classes[prompt] = "easy" if share > easy_above else "hard" if share < hard_below else OTHER
    return classes


def follow_classes(classes: Mapping[str, str], answers: Sequence[Answer]) -> dict[str, Followed]:
    """Compute pass rate and length of the answers to easy and hard prompts; each prompt counts equally.

    Example:
        >>> follow_classes({"a": "easy"}, [Answer("a", 5, True), Answer("a", 7, False), Answer("b", 1, True)])["easy"]
        Followed(prompts=1, pass_rate=0.5, tokens=6.0)
    """
    by_prompt = group_answers(answers)
    found = {}
    for name in CLASSES:
        of = [each for prompt, each in by_prompt.items() if classes.get(prompt) == name]
        rates = [sum(answer.right for answer in each) / len(each) for each in of]
        tokens = [sum(answer.tokens for answer in each) / len(each) for each in of]
        found[name] = Followed(len(of), _mean(rates), _mean(tokens))
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def count_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Count the tokens of each text, without special tokens."""
    return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []


@contextmanager
def captured(trainer: Any) -> Iterator[list[tuple[list[str], list[str], list[float]]]]:
    """Collect (prompts, outputs, scores) of each validation that verl runs inside the context.

    Raises:
        LivenessError: verl's trainer has no method that receives a validation's texts and scores.
    """
    own: Callable[..., Any] | None = getattr(trainer, _HOOK, None)
    if own is None:
        raise LivenessError(f"length_penalty.classes: the trainer has no {_HOOK}, so its validation cannot be read.")
    found: list[tuple[list[str], list[str], list[float]]] = []

    def keep(inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float]) -> Any:
        found.append((list(inputs), list(outputs), list(scores)))
        return own(inputs=inputs, outputs=outputs, scores=scores)

    setattr(trainer, _HOOK, keep)
    try:
        yield found
    finally:
        delattr(trainer, _HOOK)
