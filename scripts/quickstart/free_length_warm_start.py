"""Warm start on demonstrations of free length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from .free_length import MOST_TOKENS, demonstrate_at_length
from .free_length_reward import compute_score
from .task import Entry
from .warm_start import (
    BATCH,
    LEARNING_RATE,
    TEACHER,
    WARM_UP_STEPS,
    WEIGHT_DECAY,
    collate,
    tokenize_prompts,
    update,
    warm_start,
)


@dataclass(frozen=True)
class LengthWarmStart:
    """Settings: training ends when ``target`` of sampled answers are right, or after ``max_steps``."""

    target: float = 0.5
    max_steps: int = 1600
    check_every: int = 100
    check_prompts: int = 256


def warm_start_at_length(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    entries: list[Entry],
    report: Callable[[int, float, float], None],
    settings: LengthWarmStart = LengthWarmStart(),
) -> float:
    """Train the model in place, on single words and then on demonstrations of free length.

    ``report`` takes step, loss and share of right answers of a check.

    Returns:
        The last share of right answers.
    """
    warm_start(model, tokenizer, entries, report, TEACHER)
    rng = random.Random(0)
    prompts = tokenize_prompts(tokenizer, entries)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    assert tokenizer.pad_token_id is not None
    share = 0.0
    for step in range(1, settings.max_steps + 1):
        rows = rng.sample(range(len(entries)), min(BATCH, len(entries)))
        texts = [demonstrate_at_length(entries[row], rng) for row in rows]
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        loss = update(model, optimizer, collate([prompts[row] for row in rows], answers, tokenizer.pad_token_id))
        schedule.step()
        if step % settings.check_every == 0:
            model.eval()
            share = measure_right_share(model, tokenizer, entries[: settings.check_prompts])
            model.train()
            report(step, loss, share)
            if share >= settings.target:
                break
    return share


@torch.no_grad()
def measure_right_share(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, entries: Sequence[Entry]) -> float:
    """Compute the share of right answers, one to each question, sampled at temperature 1."""
    prompts = tokenize_prompts(tokenizer, entries)
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    there = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampled = model.generate(input_ids=ids, attention_mask=there, do_sample=True, top_k=0, max_new_tokens=MOST_TOKENS)
    texts = tokenizer.batch_decode(sampled[:, width:], skip_special_tokens=True)
    scores = [compute_score("", text, entry["answer"]) for text, entry in zip(texts, entries, strict=True)]
    return sum(scores) / len(scores)
