"""The quickstart's task with process rewards: sums modulo 5 by a chain of steps, each of which can be verified.

"Add up the digits modulo 5: 3 3 2 3" is answered by "3+3=1. So 1+2=3. So 3+3=1. ", the force prompt and "1".
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .reward import FORCE_PROMPT

BASE = 5
INSTRUCTION = f"Add up the digits modulo {BASE}: "
MARKER = "So "
LENGTHS = (3, 4)
"""Numbers of digits of questions in the warm start; training uses the last of these."""
STEP = re.compile(r"(\d)\+(\d)=(\d)\. ?")

Digits = tuple[int, ...]


@dataclass(frozen=True)
class SumsSettings:
    """Settings of questions and demonstrations.

    Attributes:
        wrong: share of a demonstration's steps that are wrong.
        at_once, early: shares of demonstrations that give the answer without any step, and after only some steps, so
            that the values of a prompt and of an early prefix are meaningful.
        heldout: number of questions that are held out.
    """

    wrong: float = 0.12
    at_once: float = 0.15
    early: float = 0.5
    heldout: int = 128
    seed: int = 1


def list_questions(settings: SumsSettings) -> dict[str, list[Digits]]:
    """List all questions of the largest length, as "heldout" and "train"; no question is in both."""
    found = list(itertools.product(range(10), repeat=LENGTHS[-1]))
    random.Random(settings.seed).shuffle(found)
    return {"heldout": found[: settings.heldout], "train": found[settings.heldout :]}


def demonstrate(digits: Digits, rng: random.Random, settings: SumsSettings) -> str:
    """Sample a chain with its answer; later steps build on a wrong step, and the answer follows from the last step."""
    steps = len(digits) - 1
    drawn = rng.random() - settings.at_once
    stop = 0 if drawn < 0 else rng.randrange(1, steps) if drawn < settings.early else steps
    total, parts = digits[0], []
    for digit in digits[1 : stop + 1]:
        right = (total + digit) % BASE
        wrong = rng.random() < settings.wrong
        found = rng.choice([each for each in range(BASE) if each != right]) if wrong else right
        parts.append(f"{total}+{digit}={found}. ")
        total = found
    return MARKER.join(parts) + FORCE_PROMPT + str((total + sum(digits[stop + 1 :])) % BASE)


def check_steps(digits: Digits, text: str) -> list[bool]:
    """Check each step of a chain, up to the first wrong one; text that is not a step ends the chain.

    Example:
        >>> check_steps((3, 3, 2, 3), "3+3=1. So 1+2=4. So 4+3=2. ")
        [True, False]
    """
    total, verdicts = digits[0], []
    for digit, episode in zip(digits[1:], text.split(MARKER), strict=False):
        step = STEP.fullmatch(episode)
        if step is None:
            break
        right = (int(step[1]), int(step[2]), int(step[3])) == (total, digit, (total + digit) % BASE)
        verdicts.append(right)
        if not right:
            break
        total = int(step[3])
    return verdicts


def ask(digits: Digits) -> str:
    """Build the question."""
    return INSTRUCTION + " ".join(map(str, digits))


def to_row(digits: Digits, index: int, split: str) -> dict[str, Any]:
    """Convert a question to verl's schema."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": ask(digits)}],
        "ability": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(sum(digits) % BASE)},
        "extra_info": {"index": index, "split": split},
    }


def read_digits(prompt: str) -> Digits:
    """Read the digits of a question from its prompt."""
    return tuple(map(int, re.findall(r"\d", prompt.partition(INSTRUCTION)[2])))


def build_sums_tokenizer() -> Any:
    """Build the quickstart's tokenizer with the force prompt and the marker as single tokens."""
    from tokenizers import AddedToken

    from .model import build_tokenizer

    tokenizer = build_tokenizer(INSTRUCTION)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (FORCE_PROMPT, MARKER)])
    return tokenizer


class StepUtilities(NamedTuple):
    """Utilities of verified steps, in nats."""

    right: list[float]
    wrong: list[float]

    @property
    def separation(self) -> float:
        """Share of pairs in which a right step has the higher utility; ties count half; NaN without a pair."""
        signs = np.sign(np.subtract.outer(self.right, self.wrong))
        return float((1 + signs.mean()) / 2) if signs.size else math.nan

    @property
    def signed(self) -> float:
        """Share of steps whose utility has the sign of their correctness."""
        fits = [each > 0 for each in self.right] + [each < 0 for each in self.wrong]
        return sum(fits) / len(fits) if fits else math.nan


def judge_utilities(rows: Sequence[tuple[str, str, Sequence[float]]]) -> StepUtilities:
    """Sort utilities by the verifier's judgement of their steps.

    Args:
        rows: (prompt, response, utility of each episode).
    """
    found = StepUtilities([], [])
    for prompt, response, utilities in rows:
        chain = response.partition(FORCE_PROMPT)[0]
        for verdict, utility in zip(check_steps(read_digits(prompt), chain), utilities, strict=False):
            (found.right if verdict else found.wrong).append(utility)
    return found


def read_recorded(files: Sequence[Path], model: Path) -> list[tuple[str, str, list[float]]]:
    """Read recorded rows in the form that ``judge_utilities`` expects; ``model`` is the folder of the tokenizer."""
    import pandas
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    columns = ["prompt_ids", "response_ids", "offpolicy_process_utility"]
    table = pandas.concat([pandas.read_parquet(file, columns=columns) for file in files])
    return [
        (
            tokenizer.decode(prompt, skip_special_tokens=True),
            tokenizer.decode(response, skip_special_tokens=True),
            [float(each) for each in found if not math.isnan(each)],
        )
        for prompt, response, found in table.itertuples(index=False)
    ]


def describe_utilities(found: StepUtilities, first_value: float) -> str:
    """Describe the values of the first step: the policy's belief before a chain, and the steps' contributions."""

    def mean(values: Sequence[float]) -> str:
        return f"{sum(values) / len(values):+.2f} (n = {len(values)})" if values else "none"

    return (
        f"V_0 is {first_value:.2f} (log 1/{BASE} is {math.log(1 / BASE):.2f}); mean U of right steps "
        f"{mean(found.right)}, of wrong ones {mean(found.wrong)}; AUC {found.separation:.2f}; "
        f"{found.signed:.0%} of steps have the sign of their correctness"
    )
