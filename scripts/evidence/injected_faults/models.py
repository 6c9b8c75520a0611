"""Models that faults need: one whose vocabulary is padded, and one whose tokens can be cut in several ways."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from scripts.quickstart.model import build_model, build_tokenizer
from scripts.quickstart.task import TaskSettings, get_instruction, splits
from scripts.quickstart.warm_start import warm_start

MERGES = 60
"""Most frequent pairs of letters that are tokens, beyond the quickstart's single bytes."""
DROPOUT = 0.4
"""Share of merges left out at random in the demonstrations, so that the model spells with long and short tokens."""


def pad_vocabulary(source: Path, target: Path, extra: int) -> None:
    """Copy a model with ``extra`` vocabulary rows beyond its tokenizer, as checkpoints have them.

    They hold what the model's initialisation would have put there. verl's rollout server masks their logits; the
    trainer does not.
    """
    model = Qwen2ForCausalLM.from_pretrained(source, dtype=torch.float32)
    size, deviation = model.config.vocab_size, model.config.initializer_range
    model.resize_token_embeddings(size + extra, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight[size:]
        rows.copy_(deviation * torch.randn(rows.shape, generator=generator))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def merging_model(target: Path, task: TaskSettings) -> None:
    """Warm-start a model that spells the same word with long or with short tokens."""
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = splits(task)["warm_start"]
    pairs = Counter(pair for entry in entries for pair in pairwise(entry["answer"]))
    frequent = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:MERGES]
    tokenizer = build_tokenizer(get_instruction(entries), frequent)
    model = build_model(tokenizer)
    tokenizer.backend_tokenizer.model.dropout = DROPOUT
    warm_start(model, tokenizer, entries, lambda step, loss, score: print(step, loss, score, flush=True))
    tokenizer.backend_tokenizer.model.dropout = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
