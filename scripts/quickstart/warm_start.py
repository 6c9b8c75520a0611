"""Supervised training for each task, so that reinforcement learning starts from a model that sometimes succeeds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast as Tokenizer

from . import free_length, reward, sums, task
from .reward import FORCE_PROMPT
from .task import Entry

IGNORED = -100
Batch = tuple[Sequence[list[int]], Sequence[str]]
"""Token ids of prompts, with an answer to each."""
Report = Callable[[int, float, float], None]
"""Callback for a check's step, loss and measured share."""


@dataclass(frozen=True)
class WarmStart:
    """Settings of a warm start.

    Attributes:
        careful: share of demonstrations that are right, if the task does not specify it.
        target, max_steps: training ends when the measured share reaches ``target``, or after ``max_steps`` steps.
        rise: number of steps in which the learning rate rises.
        cooling: number of steps after the target was reached, in which the learning rate falls to zero.
        every: number of steps between two checks.
        checked: number of questions in a check.
        tokens: longest answer in a check.
    """

    target: float
    max_steps: int
    careful: float = 1.0
    rise: int = 50
    cooling: int = 0
    every: int = 20
    checked: int = 256
    tokens: int = 10
    batch: int = 64
    learning_rate: float = 3e-3


STUDENT = WarmStart(target=0.38, max_steps=400, careful=0.35)
TEACHER = WarmStart(target=0.95, max_steps=600)
FREE_LENGTH = WarmStart(target=0.5, max_steps=1600, every=100, tokens=free_length.MOST_TOKENS)
SUMS = WarmStart(target=0.8, max_steps=1000, rise=30, cooling=200, every=40, checked=64, tokens=40)
SPREAD_OF_SUMS = 0.06
"""Standard deviation of the initial weights; with transformers' default, sums are learnt late or never."""


def tokenize_prompts(tokenizer: Tokenizer, questions: Sequence[str]) -> list[list[int]]:
    """Tokenize each question as verl's rollout renders it, ending where the answer begins."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)


def pad_left(rows: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the left, so that all answers begin in the same column: (B, T) ids and attention mask."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    return torch.tensor(ids), torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def collate(prompts: Sequence[list[int]], answers: Sequence[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """Collate to right-padded (B, T) input_ids, attention_mask and labels; only answers are learnt."""
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    learnt = [torch.tensor([IGNORED] * len(p) + a) for p, a in zip(prompts, answers, strict=True)]

    def padded(values: list[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

    attention = padded([torch.ones_like(row) for row in rows], 0)
    return {"input_ids": padded(rows, pad), "attention_mask": attention, "labels": padded(learnt, IGNORED)}


def update(model: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]) -> float:
    """Make one update on a batch from ``collate``, and return its loss."""
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def sample_texts(
    model: Any, tokenizer: Tokenizer, questions: Sequence[str], tokens: int, *, whole: bool = False
) -> list[str]:
    """Sample an answer to each question at temperature 1; ``whole``: with its special tokens."""
    ids, attention = pad_left(tokenize_prompts(tokenizer, questions), tokenizer.pad_token_id)
    sampled = model.generate(input_ids=ids, attention_mask=attention, do_sample=True, top_k=0, max_new_tokens=tokens)
    return tokenizer.batch_decode(sampled[:, ids.shape[1] :], skip_special_tokens=not whole)


def learn(
    model: Any,
    tokenizer: Tokenizer,
    settings: WarmStart,
    draw: Callable[[], Batch],
    measure: Callable[[], float],
    report: Report,
) -> float:
    """Train the model in place on drawn demonstrations.

    Returns:
        The share measured by the first check that reached the target, after which the learning rate falls; otherwise by
        the last check.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    share, reached = 0.0, None
    for step in range(1, settings.max_steps + 1):
        behind = 0 if reached is None else step - reached
        if behind > settings.cooling:
            break
        fallen = behind / settings.cooling if behind else 0.0
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(step / settings.rise, 1.0 - fallen)
        prompts, texts = draw()
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        loss = update(model, optimizer, collate(prompts, answers, tokenizer.pad_token_id))
        if step % settings.every == 0:
            model.eval()
            measured = measure()
            model.train()
            report(step, loss, measured)
            if reached is None:
                share, reached = measured, step if measured >= settings.target else None
    return share


def learn_entries(
    model: Any,
    tokenizer: Tokenizer,
    entries: Sequence[Entry],
    settings: WarmStart,
    demonstrate: Callable[[Entry, random.Random], str],
    score: Callable[[Entry, str], float],
    report: Report,
) -> float:
    """Train on demonstrations of reasoning-gym's questions; return the mean score of sampled answers."""
    rng, checked = random.Random(0), entries[: settings.checked]
    prompts = tokenize_prompts(tokenizer, [entry["question"] for entry in entries])

    def draw() -> Batch:
        rows = rng.sample(range(len(entries)), min(settings.batch, len(entries)))
        return [prompts[row] for row in rows], [demonstrate(entries[row], rng) for row in rows]

    def measure() -> float:
        texts = sample_texts(model, tokenizer, [entry["question"] for entry in checked], settings.tokens)
        return sum(map(score, checked, texts)) / len(checked)

    return learn(model, tokenizer, settings, draw, measure, report)


def grade(entry: Entry, text: str) -> dict[str, float]:
    """Score an answer as verl does."""
    return reward.grade(entry["metadata"]["source_dataset"], text, entry)


def warm_start(
    model: Any, tokenizer: Tokenizer, entries: Sequence[Entry], report: Report, settings: WarmStart = STUDENT
) -> float:
    """Train the model in place on single words, as a student or as a teacher; return the mean score."""
    torch.manual_seed(0)

    demonstrate = partial(task.demonstrate, careful=settings.careful)

    def score(entry: Entry, text: str) -> float:
        return grade(entry, text)["score"]

    return learn_entries(model, tokenizer, entries, settings, demonstrate, score, report)


def warm_start_at_length(
    model: Any, tokenizer: Tokenizer, entries: Sequence[Entry], report: Report, settings: WarmStart = FREE_LENGTH
) -> float:
    """Train the model in place, on single words and then on demonstrations of free length; return the share right."""
    warm_start(model, tokenizer, entries, report, TEACHER)

    def score(entry: Entry, text: str) -> float:
        return reward.score_last_word("", text, entry["answer"])

    demonstrate = free_length.demonstrate_at_length
    return learn_entries(model, tokenizer, entries, settings, demonstrate, score, report)


def measure_right_steps(
    model: Any, tokenizer: Tokenizer, questions: Sequence[sums.Digits], tokens: int = SUMS.tokens
) -> float:
    """Compute the share of right steps in one chain per question, sampled at temperature 1."""
    texts = sample_texts(model, tokenizer, [sums.ask(digits) for digits in questions], tokens, whole=True)
    chains = [text.partition(FORCE_PROMPT)[0] for text in texts]
    verdicts = [each for pair in zip(questions, chains, strict=True) for each in sums.check_steps(*pair)]
    return sum(verdicts) / max(len(verdicts), 1)


def warm_start_sums(
    model: Any, tokenizer: Tokenizer, data: sums.SumsSettings, report: Report, settings: WarmStart = SUMS
) -> float:
    """Train the model in place on questions that are not held out; return the share of right steps."""
    torch.manual_seed(data.seed)
    rng = random.Random(data.seed)
    train = sums.list_questions(data)["train"]
    shorter = list(itertools.product(range(10), repeat=sums.LENGTHS[0]))

    def draw() -> Batch:
        chosen = [rng.choice(train if rng.random() < 0.5 else shorter) for _ in range(settings.batch)]
        texts = [sums.demonstrate(digits, rng, data) for digits in chosen]
        return tokenize_prompts(tokenizer, [sums.ask(digits) for digits in chosen]), texts

    def measure() -> float:
        return measure_right_steps(model, tokenizer, train[: settings.checked], settings.tokens)

    return learn(model, tokenizer, settings, draw, measure, report)
