"""A short supervised phase, so that reinforcement learning starts from a model that sometimes succeeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from .reward import compute_score
from .task import Entry, demonstrate, to_row

IGNORED = -100


@dataclass(frozen=True)
class WarmStartSettings:
    """Settings of one warm start.

    Attributes:
        careful: share of demonstrations that are right.
        target, max_steps: training ends when answers sampled at temperature 1 have this mean score, or after so many
            steps.
    """

    careful: float
    target: float
    max_steps: int


STUDENT = WarmStartSettings(careful=0.35, target=0.38, max_steps=400)
TEACHER = WarmStartSettings(careful=1.0, target=0.95, max_steps=600)
BATCH, LEARNING_RATE, WARM_UP_STEPS, WEIGHT_DECAY = 64, 3e-3, 50, 0.01
CHECK_EVERY, CHECK_PROMPTS, MAX_ANSWER_TOKENS = 20, 256, 10


def tokenize_prompts(tokenizer: PreTrainedTokenizerFast, entries: Sequence[Entry]) -> list[list[int]]:
    """Tokenize each prompt as verl's rollout renders it, ending where the answer begins."""
    chats = [[{"role": "user", "content": entry["question"]}] for entry in entries]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)


def collate(prompts: Sequence[list[int]], answers: Sequence[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """Collate to right-padded (B, T) input_ids, attention_mask and labels; only answers are learnt."""
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    learnt = [torch.tensor([IGNORED] * len(p) + a) for p, a in zip(prompts, answers, strict=True)]

    def padded(values: list[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

    attention = padded([torch.ones_like(row) for row in rows], 0)
    return {"input_ids": padded(rows, pad), "attention_mask": attention, "labels": padded(learnt, IGNORED)}


def update(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]) -> float:
    """Make one update by a batch of ``collate``, and return its loss."""
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def measure_sample_score(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, entries: Sequence[Entry]
) -> float:
    """Compute the mean score of one answer per question, sampled at temperature 1."""
    prompts = tokenize_prompts(tokenizer, entries)
    width = max(map(len, prompts))
    # Left padding, so that all answers begin in the same column.
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampled = model.generate(
        input_ids=ids, attention_mask=attention, do_sample=True, top_k=0, max_new_tokens=MAX_ANSWER_TOKENS
    )
    score = 0.0
    for entry, text in zip(entries, tokenizer.batch_decode(sampled[:, width:], skip_special_tokens=True), strict=True):
        row = to_row(entry, 0, "warm_start")
        score += compute_score(row["data_source"], text, entry["answer"], row["extra_info"])["score"]
    return score / len(entries)


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    entries: Sequence[Entry],
    report: Callable[[int, float, float], None],
    settings: WarmStartSettings = STUDENT,
    seed: int = 0,
) -> float:
    """Train the model in place on demonstrations; `report` takes step, loss and sampled score of a check.

    Returns:
        The last sampled score.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    prompts = tokenize_prompts(tokenizer, entries)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id is not None
    score = 0.0
    for step in range(1, settings.max_steps + 1):
        rows = rng.sample(range(len(entries)), BATCH)
        texts = [demonstrate(entries[row], rng, settings.careful) for row in rows]
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        batch = collate([prompts[row] for row in rows], answers, tokenizer.pad_token_id)
        loss = update(model, optimizer, batch)
        schedule.step()
        if step % CHECK_EVERY == 0:
            model.eval()
            score = measure_sample_score(model, tokenizer, entries[:CHECK_PROMPTS])
            model.train()
            report(step, loss, score)
            if score >= settings.target:
                break
    return score
