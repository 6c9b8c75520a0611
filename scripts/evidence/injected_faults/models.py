"""Models that faults need: one whose vocabulary is padded, and one whose tokens can be cut in several ways."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from scripts.quickstart.model import build_model, build_tokenizer
from scripts.quickstart.task import TaskSettings, get_instruction, splits
from scripts.quickstart.warm_start import warm_start

MERGES = 60
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


def build_merging_tokenizer(instruction_text: str, words: list[str]) -> PreTrainedTokenizerFast:
    """Build the quickstart's byte tokenizer with the ``MERGES`` most frequent letter pairs as further tokens."""
    pairs = Counter(pair for word in words for pair in pairwise(word))
    frequent = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:MERGES]
    return build_tokenizer(instruction_text, [pair for pair, _ in frequent])


def merging_model(target: Path, task: TaskSettings) -> None:
    """Warm-start a model that spells the same word with long or with short tokens."""
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = splits(task)["warm_start"]
    words = [entry["answer"] for entry in entries]
    random.Random(0).shuffle(words)
    tokenizer = build_merging_tokenizer(get_instruction(entries), words)
    model = build_model(tokenizer)
    tokenizer.backend_tokenizer.model.dropout = DROPOUT
    warm_start(model, tokenizer, entries, lambda step, loss, score: print(step, loss, score, flush=True))
    tokenizer.backend_tokenizer.model.dropout = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
