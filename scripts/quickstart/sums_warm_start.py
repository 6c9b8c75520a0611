"""The supervised phase of the sums, after which most steps of a chain are right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from .sums import LENGTHS, Digits, SumsSettings, check_steps, demonstrate, list_questions, to_row
from .sums_reward import FORCE_PROMPT
from .warm_start import collate, tokenize_prompts, update


@dataclass(frozen=True)
class SumsWarmStartSettings:
    """Settings of the warm start.

    Attributes:
        spread: standard deviation of the weights before it; from transformers' default, sums are learnt late or never.
        batch, learning_rate: of AdamW.
        target: share of sampled steps that are right, at which the learning rate begins to fall.
        cooling: steps in which it falls to zero.
        max_steps: without the target, this many.
    """

    spread: float = 0.06
    batch: int = 64
    learning_rate: float = 3e-3
    target: float = 0.8
    cooling: int = 200
    max_steps: int = 1000


WARM_UP_STEPS, CHECK_EVERY, CHECK_QUESTIONS, MAX_ANSWER_TOKENS = 30, 40, 64, 40


def tokenize_questions(tokenizer: PreTrainedTokenizerFast, questions: Sequence[Digits]) -> list[list[int]]:
    """Tokenize each question as verl's rollout renders it."""
    return tokenize_prompts(
        tokenizer, [{"question": to_row(digits, 0, "")["prompt"][0]["content"]} for digits in questions]
    )


@torch.no_grad()
def measure_right_share(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Digits]
) -> float:
    """Compute the share of right steps in one chain per question, sampled at temperature 1.

    Args:
        questions: of one length.
    """
    ids = torch.tensor(tokenize_questions(tokenizer, questions))
    sampled = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_ANSWER_TOKENS,
    )
    texts = [text.partition(FORCE_PROMPT)[0] for text in tokenizer.batch_decode(sampled[:, ids.shape[1] :])]
    verdicts = [each for digits, text in zip(questions, texts, strict=True) for each in check_steps(digits, text)]
    return sum(verdicts) / max(len(verdicts), 1)


def warm_start_sums(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    data: SumsSettings,
    settings: SumsWarmStartSettings,
    report: Callable[[int, float, float], None],
) -> bool:
    """Train the model in place on demonstrations of questions that are not held out.

    Args:
        report: takes step, loss and share of right steps of a check.

    Returns:
        True if the target was met.
    """
    torch.manual_seed(data.seed)
    rng = random.Random(data.seed)
    train = list_questions(data)["train"]
    shorter = list(itertools.product(range(10), repeat=LENGTHS[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    reached: int | None = None
    """Step that met the target."""
    for step in range(1, settings.max_steps + 1):
        fallen = 0.0 if reached is None else (step - reached) / settings.cooling
        if fallen > 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(step / WARM_UP_STEPS, 1.0 - fallen)
        chosen = [rng.choice(train if rng.random() < 0.5 else shorter) for _ in range(settings.batch)]
        texts = [demonstrate(digits, rng, data) for digits in chosen]
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        prompts = tokenize_questions(tokenizer, chosen)
        loss = update(model, optimizer, collate(prompts, answers, tokenizer.pad_token_id))
        if step % CHECK_EVERY == 0:
            model.eval()
            share = measure_right_share(model, tokenizer, train[:CHECK_QUESTIONS])
            model.train()
            report(step, loss, share)
            if reached is None and share >= settings.target:
                reached = step
    return reached is not None
