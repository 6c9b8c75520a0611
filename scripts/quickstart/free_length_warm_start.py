"""Warm start on demonstrations of free length."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from .free_length import demonstrate_at_length
from .task import Entry
from .warm_start import (
    BATCH,
    CHECK_EVERY,
    LEARNING_RATE,
    WARM_UP_STEPS,
    WEIGHT_DECAY,
    collate,
    tokenize_prompts,
    update,
)

STEPS = 400


def warm_start_at_length(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    entries: list[Entry],
    report: Callable[[int, float], None],
    steps: int = STEPS,
) -> float:
    """Train the model in place on demonstrations; ``report`` takes step and loss. Return the last loss."""
    torch.manual_seed(0)
    rng = random.Random(0)
    prompts = tokenize_prompts(tokenizer, entries)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    assert tokenizer.pad_token_id is not None
    loss = 0.0
    for step in range(1, steps + 1):
        rows = rng.sample(range(len(entries)), min(BATCH, len(entries)))
        texts = [demonstrate_at_length(entries[row], rng) for row in rows]
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        loss = update(model, optimizer, collate([prompts[row] for row in rows], answers, tokenizer.pad_token_id))
        schedule.step()
        if step % CHECK_EVERY == 0:
            report(step, loss)
    return loss
