"""The quickstart's task: reasoning-gym questions, split three ways, in verl's Parquet schema."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reasoning_gym

Entry = dict[str, Any]


@dataclass(frozen=True)
class TaskSettings:
    """Family, difficulty and number of the questions; a model of 0.4 M parameters learns to spell words this short."""

    family: str = "spell_backward"
    difficulty: Mapping[str, int] = field(default_factory=lambda: {"min_word_len": 3, "max_word_len": 6})
    seed: int = 1
    heldout: int = 256
    train: int = 2048
    warm_start: int = 4096


ARITHMETIC = TaskSettings(
    "chain_sum",
    {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    heldout=48,
    train=140,
    warm_start=0,
)
"""Sums and differences of two digits, of which there are 200."""


def splits(settings: TaskSettings) -> dict[str, list[Entry]]:
    """Draw the questions of "heldout", "train" and "warm_start"; no question is in two of them.

    Questions are compared without regard to case, because the scorer compares answers that way.

    Raises:
        ValueError: the family has fewer different questions than the settings require.
    """
    sizes = {"heldout": settings.heldout, "train": settings.train, "warm_start": settings.warm_start}
    wanted = sum(sizes.values())
    source = reasoning_gym.create_dataset(settings.family, size=10 * wanted, seed=settings.seed, **settings.difficulty)
    distinct: dict[str, Entry] = {}
    for index in range(len(source)):
        entry = source[index]
        distinct.setdefault(entry["question"].casefold(), entry)
        if len(distinct) == wanted:
            break
    else:
        raise ValueError(
            f"{settings.family} has {len(distinct)} different questions, but {wanted} are needed: request fewer, or "
            f"widen {dict(settings.difficulty)}"
        )
    pool = iter(distinct.values())
    return {name: [next(pool) for _ in range(size)] for name, size in sizes.items()}


def get_instruction(entries: Sequence[Entry]) -> str:
    """Return the text that all questions begin with, for instance "Spell this word backward: "."""
    return os.path.commonprefix([entry["question"] for entry in entries])  # noqa: RUF071 - by letters is meant


def demonstrate(entry: Entry, rng: random.Random, careful: float) -> str:
    """Sample an answer of a careless speller: right with probability `careful`, otherwise the word unchanged.

    The warm start trains on these answers, so the model knows two ways of answering and prefers the wrong one, which
    the verifier's reward can then correct.
    """
    return entry["answer"] if rng.random() < careful else entry["metadata"]["word"]


def to_row(entry: Entry, index: int, split: str) -> dict[str, Any]:
    """Convert a question to verl's schema; `extra_info` suffices to rebuild reasoning-gym's entry."""
    family, metadata = entry["metadata"]["source_dataset"], json.dumps(entry["metadata"], sort_keys=True)
    return {
        "data_source": f"reasoning_gym/{family}",
        "prompt": [{"role": "user", "content": entry["question"]}],
        "ability": family,
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": index, "split": split, "question": entry["question"], "metadata": metadata},
    }


def write_parquet(
    questions: Sequence[Any], split: str, path: Path, to_row: Callable[[Any, int, str], dict[str, Any]] = to_row
) -> None:
    """Write the rows of one split."""
    import pandas

    pandas.DataFrame([to_row(each, index, split) for index, each in enumerate(questions)]).to_parquet(path)
