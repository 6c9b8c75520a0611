"""Easy and hard prompts, classified once by an early checkpoint's answers, and later answers to these prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...proof.verify import LivenessError

CLASSES = ("easy", "hard")
OTHER = "other"
_HOOK = "_maybe_log_val_generations"
"""Method to which every trainer of verl 0.7.1 to 0.9.1 passes all texts and scores of a validation."""


class Answer(NamedTuple):
    """One sampled answer: its prompt's text, its response tokens, and whether it is correct."""

    prompt: str
    tokens: int
    right: bool


class Followed(NamedTuple):
    """Answers to the prompts of one class: number of prompts, and mean pass rate and mean tokens over the prompts."""

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
    """Collect (prompts, outputs, scores) of each validation that verl runs within the context.

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
