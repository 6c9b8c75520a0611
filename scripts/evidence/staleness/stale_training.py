"""Training whose samples are eta steps old: the project's own stages, and verl's advantages and loss.

Eight prompts have answers of eight tokens. A queue holds the batches that the sampler is ahead by: the batch that step
i trains was sampled by the weights before step i - eta, or by the first ones. With eta unbounded the sampler keeps its
first weights.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
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

VOCABULARY, LENGTH, PROMPTS = 8, 8, 8
WIDTH = 48
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


class ToyPolicy(nn.Module):
    """A GRU over the tokens of an answer, told the prompt and the place of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.prompt = nn.Embedding(PROMPTS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Sample an answer to each of B prompts: its tokens and their log mu, (B, LENGTH) each."""
        return self._answer(prompts, lambda place, log_probs: torch.multinomial(log_probs.exp(), 1)[:, 0])

    def forward(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Compute the log-probs of given answers, (B, LENGTH)."""
        return self._answer(prompts, lambda place, log_probs: tokens[:, place])[1]

    def _answer(self, prompts: Tensor, choose: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        last, hidden = torch.full_like(prompts, VOCABULARY), torch.zeros(len(prompts), WIDTH)
        tokens, log_probs = [], []
        for place in range(LENGTH):
            seen = self.token(last) + self.prompt(prompts) + self.place.weight[place]
            hidden = self.cell(seen, hidden)
            all_log_probs = self.head(hidden).log_softmax(-1)
            last = choose(place, all_log_probs)
            tokens.append(last)
            log_probs.append(all_log_probs.gather(1, last[:, None])[:, 0])
        return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def compute_rewards(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Compute the share of tokens that are right, (B,): at place t the answer to prompt p is (p + 3 t) mod 8."""
    right = (prompts[:, None] + 3 * torch.arange(LENGTH)) % VOCABULARY
    return (tokens == right).float().mean(1)


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
