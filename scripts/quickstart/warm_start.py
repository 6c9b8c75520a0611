"""A short supervised phase, so that reinforcement learning starts from a model that sometimes succeeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from reward import compute_score
from task import Entry, demonstrate, to_row
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

IGNORED = -100


@dataclass(frozen=True)
class WarmStartSettings:
    """Length and aim of the supervised phase.

    It stops when the mean score of answers sampled at temperature 1 reaches `target`, or after `max_steps`.
    """

    careful: float = 0.35
    target: float = 0.38
    max_steps: int = 400
    batch: int = 64
    learning_rate: float = 3e-3
    warm_up_steps: int = 50
    check_every: int = 20
    check_prompts: int = 256
    max_answer_tokens: int = 10
    seed: int = 0


def prompt_ids(tokenizer: PreTrainedTokenizerFast, entries: Sequence[Entry]) -> list[list[int]]:
    """Token ids of each prompt as verl's rollout renders it, ending where the answer begins."""
    chats = [[{"role": "user", "content": entry["question"]}] for entry in entries]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)


def collate(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded (B, T) ids, attention mask and labels; only answers are learnt."""
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), width), pad)
    attention = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        attention[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, attention, labels


@torch.no_grad()
def sampled_score(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    entries: Sequence[Entry],
    max_answer_tokens: int,
) -> float:
    """Mean score of one answer per question, sampled at temperature 1."""
    prompts = prompt_ids(tokenizer, entries)
    width = max(map(len, prompts))
    # Left padding, so that all answers begin in the same column.
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampled = model.generate(
        input_ids=ids, attention_mask=attention, do_sample=True, top_k=0, max_new_tokens=max_answer_tokens
    )
    texts = tokenizer.batch_decode(sampled[:, width:], skip_special_tokens=True)
    scores = []
    for entry, text in zip(entries, texts, strict=True):
        row = to_row(entry, 0, "warm_start")
        scores.append(compute_score(row["data_source"], text, entry["answer"], row["extra_info"]))
    return sum(scores) / len(scores)


def warm_start(
    settings: WarmStartSettings,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    entries: Sequence[Entry],
    report: Callable[[int, float, float], None],
) -> float:
    """Trains the model in place on careless demonstrations; gives the last sampled score.

    Args:
        report: called with (step, loss, sampled score) at every check.
    """
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    prompts = prompt_ids(tokenizer, entries)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warm_up_steps))
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id is not None
    score = 0.0
    for step in range(1, settings.max_steps + 1):
        rows = rng.sample(range(len(entries)), settings.batch)
        texts = [demonstrate(entries[row], rng, settings.careful) for row in rows]
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        ids, attention, labels = collate([prompts[row] for row in rows], answers, tokenizer.pad_token_id)
        loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % settings.check_every == 0:
            model.eval()
            score = sampled_score(model, tokenizer, entries[: settings.check_prompts], settings.max_answer_tokens)
            model.train()
            report(step, loss.item(), score)
            if score >= settings.target:
                break
    return score
