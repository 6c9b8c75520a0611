"""Training whose samples are eta steps old: the project's own stages, and verl's advantages and loss.

A queue holds the batches that the sampler is ahead by: the batch that step i trains was sampled by the weights before
step i - eta, or by the first ones. With eta unbounded the sampler keeps its first weights.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.workers.config import ActorConfig

from .toy_policy import LENGTH, PROMPTS, ToyPolicy, compute_rewards

ARMS = ("bypass", "resampling", "decoupled_ppo")
"""Options of ``configs/correction/``: pi_old is mu; pi_old is recomputed and nothing is corrected; and it is."""
ETAS = (0, 1, 2, 4, 8, 16, math.inf)
RATES = (1e-2, 3e-2)
STEPS, MINI_BATCHES, ROLLOUTS = 90, 2, 8
EVALUATIONS = 3
"""Of a run, at its end and every tenth step before it; their mean is its score."""
_OPTIONS = Path(__file__).resolve().parents[3] / "configs" / "correction"
_EVALUATED = 16
_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Run:
    """One run's settings."""

    arm: str
    eta: float
    rate: float
    seed: int


@dataclass(frozen=True)
class Rollouts:
    """A batch as it was sampled: prompts (B,), tokens and log mu (B, LENGTH), and the mean reward of each answer."""

    prompts: Tensor
    tokens: Tensor
    log_mu: Tensor
    rewards: Tensor


@cache
def read_arm(name: str) -> CorrectionSpec:
    """Read a shipped correction."""
    return CorrectionSpec.from_mapping(yaml.safe_load((_OPTIONS / f"{name}.yaml").read_text()))


def train(run: Run, steps: int = STEPS) -> float:
    """Train once and return the score: the mean reward of the last evaluations, in [0, 1]."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    policy, spec = ToyPolicy(), read_arm(run.arm)
    optimizer = torch.optim.Adam(policy.parameters(), lr=run.rate)
    sampler = policy if math.isfinite(run.eta) else copy.deepcopy(policy)
    ahead = int(run.eta) if math.isfinite(run.eta) else 0
    queue = deque(_sample(sampler, ROLLOUTS) for _ in range(ahead))
    scores = []
    for step in range(1, steps + 1):
        queue.append(_sample(sampler, ROLLOUTS))
        _update(policy, optimizer, queue.popleft(), spec)
        if (steps - step) % 10 == 0:
            scores.append(float(_sample(policy, _EVALUATED).rewards.mean()))
    return sum(scores[-EVALUATIONS:]) / len(scores[-EVALUATIONS:])


def _sample(policy: ToyPolicy, each: int) -> Rollouts:
    prompts = torch.arange(PROMPTS).repeat_interleave(each)
    tokens, log_mu = policy.sample(prompts)
    return Rollouts(prompts, tokens, log_mu, compute_rewards(prompts, tokens))


def _update(policy: ToyPolicy, optimizer: torch.optim.Optimizer, batch: Rollouts, spec: CorrectionSpec) -> None:
    """Take a step for each mini-batch, with pi_old, weight and masks as the correction makes them."""
    mask = torch.ones_like(batch.tokens, dtype=torch.bool)
    rewards = torch.zeros(len(mask), LENGTH)
    rewards[:, -1] = batch.rewards
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask.float(), batch.prompts.numpy())
    with torch.no_grad():
        old = batch.log_mu if spec.proximal == "bypass" else policy(batch.prompts, batch.tokens)
    for rows in torch.randperm(len(mask)).chunk(MINI_BATCHES):
        log_prob = policy(batch.prompts[rows], batch.tokens[rows])
        stage = rollout_stage(
            spec,
            old_log_prob=old[rows],
            rollout_log_prob=batch.log_mu[rows],
            response_mask=mask[rows],
            measure="nothing",
        )
        step = step_stage(spec, stage, log_prob=log_prob.detach(), advantages=advantages[rows])
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=old[rows],
            log_prob=log_prob,
            advantages=advantages[rows],
            response_mask=mask[rows].float(),
            loss_agg_mode="token-mean",
            config=_actor_config(),
            rollout_is_weights=step.weight * step.keep,
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), _LARGEST_GRADIENT)
        optimizer.step()


@cache
def _actor_config() -> Any:
    """verl's own defaults: a clip of 0.2, and of 3 for negative advantages."""
    return ActorConfig(strategy="fsdp2", rollout_n=ROLLOUTS, ppo_micro_batch_size_per_gpu=1)
