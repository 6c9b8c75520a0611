"""GRPO in one process on the task with free length: verl's estimator and loss, and the length penalty around it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import AutoTokenizer, Qwen2ForCausalLM

from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.trainer.batch_view_v0 import DataProtoBatch
from scripts.quickstart.free_length import ANCHOR, COEFFICIENTS, MOST_TOKENS
from scripts.quickstart.reward import score_last_word
from scripts.quickstart.task import Entry
from scripts.quickstart.warm_start import pad_left, tokenize_prompts
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.workers.config import FSDPActorConfig

PROMPTS, ROWS, RATE = 8, 8, 3e-4


@dataclass(frozen=True)
class Sampled:
    """One batch of answers, right-padded (B, T)."""

    prompts: list[list[int]]
    tokens: Tensor
    log_probs: Tensor
    mask: Tensor


def build_penalty(arm: str) -> LengthPenalty:
    """Build the extension of an arm, with anchors by source: no prompt comes twice here."""
    kind, _, place = arm.partition("/")
    settings = {"kind": kind, "place": place or "after", "coefficient": COEFFICIENTS.get(kind)}
    penalty = LengthPenalty("length_penalty", settings | {"anchor": ANCHOR})
    algorithm = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True}
    penalty.begin(OmegaConf.create({"algorithm": algorithm, "data": {"max_response_length": MOST_TOKENS}}))
    return penalty


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, prompts: Sequence[list[int]], pad: int, end: int, rng: torch.Generator) -> Sampled:
    """Sample an answer to each prompt at temperature 1."""
    ids, there = pad_left(prompts, pad)
    places = (there.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=there, position_ids=places, use_cache=True)
    place, alive = places[:, -1:], torch.ones(len(prompts), dtype=torch.bool)
    tokens, log_probs, masks = [], [], []
    for _ in range(MOST_TOKENS):
        scores = out.logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=rng)
        tokens.append(chosen[:, 0])
        log_probs.append(scores.gather(1, chosen)[:, 0])
        masks.append(alive.clone())
        alive &= chosen[:, 0] != end
        if not alive.any():
            break
        place = place + 1
        there = torch.cat([there, torch.ones_like(place)], -1)
        past = out.past_key_values
        out = model(input_ids=chosen, attention_mask=there, position_ids=place, past_key_values=past, use_cache=True)
    return Sampled(list(prompts), torch.stack(tokens, 1), torch.stack(log_probs, 1), torch.stack(masks, 1))


def score_tokens(model: Qwen2ForCausalLM, found: Sampled, rows: Sequence[int], pad: int) -> Tensor:
    """Compute log pi of the sampled tokens of some rows, (b, T), with their gradient."""
    prompts, given = pad_left([found.prompts[row] for row in rows], pad)
    mask = found.mask[rows]
    answers = torch.where(mask, found.tokens[rows], pad)
    ids, there = torch.cat([prompts, answers], -1), torch.cat([given, mask.long()], -1)
    places = (there.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=there, position_ids=places).logits[:, prompts.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, answers[..., None])[..., 0] * mask


def estimate(found: Sampled, scores: Tensor, penalty: LengthPenalty, step: int) -> Tensor:
    """Compute verl's GRPO with the penalty around it, (B, T)."""
    mask, count = found.mask, len(scores)
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(count), mask.sum(-1) - 1] = scores
    ones = torch.ones(count, 1, dtype=torch.int64)
    columns = {"prompts": ones, "responses": found.tokens, "response_mask": mask.long(), "token_level_scores": rewards}
    batch = DataProto.from_dict(columns | {"attention_mask": torch.cat([ones, mask.long()], -1)})
    batch.batch["token_level_rewards"] = rewards
    uids = np.array([str(row // ROWS) for row in range(count)], dtype=object)
    batch.non_tensor_batch |= {"uid": uids, "data_source": np.array(["words"] * count, dtype=object)}
    view = DataProtoBatch(batch, step)

    def grpo() -> None:
        lowered = batch.batch["token_level_rewards"].clone()
        view.put_advantages(compute_grpo_outcome_advantage(lowered, mask.float(), uids)[0], returns=True)

    AddOns([penalty]).compute_advantages(view, grpo)
    return view.advantages


def train(arm: str, seed: int, folder: Path, entries: Sequence[Entry], steps: int) -> list[dict[str, Any]]:
    """Train from the warm start in ``folder``; return each step's lengths, penalties and share of right answers."""
    torch.manual_seed(seed)
    rng, order = torch.Generator().manual_seed(seed), random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    config = FSDPActorConfig(
        strategy="fsdp2", ppo_mini_batch_size=PROMPTS, ppo_micro_batch_size_per_gpu=64, rollout_n=ROWS,
        use_torch_compile=False,
    )  # fmt: skip
    penalty, history = build_penalty(arm), []
    for step in range(1, steps + 1):
        chosen = [entry for entry in order.sample(list(entries), PROMPTS) for _ in range(ROWS)]
        found = sample(model, tokenize_prompts(tokenizer, [entry["question"] for entry in chosen]), pad, end, rng)
        texts = [
            tokenizer.decode(t[m].tolist(), skip_special_tokens=True)
            for t, m in zip(found.tokens, found.mask, strict=True)
        ]
        scores = torch.tensor([score_last_word("", text, e["answer"]) for text, e in zip(texts, chosen, strict=True)])
        advantages = estimate(found, scores, penalty, step)
        # Two gradient steps on each batch, as in the quickstart.
        for rows in torch.arange(len(chosen)).tensor_split(2):
            log_prob = score_tokens(model, found, rows.tolist(), pad)
            loss, _ = compute_policy_loss_vanilla(
                old_log_prob=found.log_probs[rows] * found.mask[rows],
                log_prob=log_prob,
                advantages=advantages[rows],
                response_mask=found.mask[rows].float(),
                loss_agg_mode="token-mean",
                config=config,
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        lengths = {name: value for name, value in penalty.metrics().items() if name.startswith("length/")}
        data = {
            "response_length/mean": float(found.mask.sum(-1).float().mean()),
            "critic/score/mean": float(scores.mean()),
        }
        history.append({"step": step, "data": data | lengths})
    return history
