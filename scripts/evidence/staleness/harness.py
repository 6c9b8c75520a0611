"""Measures the cost of staleness, with and without a correction, for a small policy trained on samples eta steps old.

    python scripts/evidence/staleness/harness.py [--seeds 5] [--processes 2] [--out outputs/staleness.png]

There are eight prompts, with answers of eight tokens. The stages are the project's own; advantages and loss are verl's.
A queue contains the batches by which the sampler is ahead. The batch on which step i trains was therefore sampled with
the weights from before step i - eta, or with the initial weights if there was no such step. If eta is unbounded, the
sampler keeps its initial weights.

Trains with each of three shipped corrections at eta 0, 1, 2, 4, 8, 16 and without a bound, at two learning rates. This
takes about ten minutes on two cores. Prints scores with intervals, draws them, and exits with 1 unless, at eta 8,
training collapses with clipping around mu but not with decoupled PPO.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    sys.exit(print(__doc__))

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]  # this checkout's recipe, installed or not
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import yaml
from seeds import ClaimError, draw_levels, draw_means, find_percentiles, require
from torch import Tensor, nn

from recipe.offpolicy.analysis.plotting import create_axes, save
from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from scripts.harness import add_counts, build_parser, format_markdown
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.workers.config import ActorConfig

VOCABULARY, LENGTH, PROMPTS = 8, 8, 8
WIDTH = 48
ARMS = ("bypass", "resampling", "decoupled_ppo")
"""Options in ``configs/correction/``: pi_old is mu; pi_old is recomputed, without a correction; pi_old is recomputed,
with a correction."""
ETAS = (0, 1, 2, 4, 8, 16, math.inf)
RATES = (1e-2, 3e-2)
STEPS, MINI_BATCHES, ROLLOUTS = 90, 2, 8
EVALUATIONS = 3
"""Number of evaluations of a run, at its end and at every tenth step before it; the run's score is their mean."""
_EVALUATED = 16
_LARGEST_GRADIENT = 1.0


class ToyPolicy(nn.Module):
    """A GRU over the tokens of an answer, with the prompt and the position of each token as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.prompt = nn.Embedding(PROMPTS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Sample an answer to each of B prompts; return tokens and log mu, (B, LENGTH) each."""
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
    """Compute the share of correct tokens, (B,): at position t, the answer to prompt p is (p + 3 t) mod 8."""
    right = (prompts[:, None] + 3 * torch.arange(LENGTH)) % VOCABULARY
    return (tokens == right).float().mean(1)


class Run(NamedTuple):
    """One run's settings."""

    arm: str
    eta: float
    rate: float
    seed: int


class Rollouts(NamedTuple):
    """A batch as it was sampled: prompts (B,), tokens and log mu (B, LENGTH), and each answer's mean reward."""

    prompts: Tensor
    tokens: Tensor
    log_mu: Tensor
    rewards: Tensor


@cache
def read_arm(name: str) -> CorrectionSpec:
    """Read a shipped correction."""
    return CorrectionSpec.from_mapping(yaml.safe_load((ROOT / "configs" / "correction" / f"{name}.yaml").read_text()))


def train(run: Run) -> float:
    """Train once and return the score: the mean reward of the last evaluations, in [0, 1]."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    policy, spec = ToyPolicy(), read_arm(run.arm)
    optimizer = torch.optim.Adam(policy.parameters(), lr=run.rate)
    sampler = policy if math.isfinite(run.eta) else copy.deepcopy(policy)
    ahead = int(run.eta) if math.isfinite(run.eta) else 0
    queue = deque(_sample(sampler, ROLLOUTS) for _ in range(ahead))
    scores = []
    for step in range(1, STEPS + 1):
        queue.append(_sample(sampler, ROLLOUTS))
        _update(policy, optimizer, queue.popleft(), spec)
        if (STEPS - step) % 10 == 0:
            scores.append(float(_sample(policy, _EVALUATED).rewards.mean()))
    return sum(scores[-EVALUATIONS:]) / len(scores[-EVALUATIONS:])


def _sample(policy: ToyPolicy, each: int) -> Rollouts:
    prompts = torch.arange(PROMPTS).repeat_interleave(each)
    tokens, log_mu = policy.sample(prompts)
    return Rollouts(prompts, tokens, log_mu, compute_rewards(prompts, tokens))


def _update(policy: ToyPolicy, optimizer: torch.optim.Optimizer, batch: Rollouts, spec: CorrectionSpec) -> None:
    """Make an optimizer step for each mini-batch, with pi_old, weight and masks from the correction."""
    mask = torch.ones_like(batch.tokens, dtype=torch.bool)
    rewards = torch.zeros(len(mask), LENGTH)
    rewards[:, -1] = batch.rewards
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask.float(), batch.prompts.numpy())
    with torch.no_grad():
        old = batch.log_mu if spec.proximal == "bypass" else policy(batch.prompts, batch.tokens)
    # verl's defaults: a clip of 0.2, and a dual clip of 3 for negative advantages.
    config = ActorConfig(strategy="fsdp2", rollout_n=ROLLOUTS, ppo_micro_batch_size_per_gpu=1)
    for rows in torch.randperm(len(mask)).chunk(MINI_BATCHES):
        log_prob = policy(batch.prompts[rows], batch.tokens[rows])
        columns: Any = {"old_log_prob": old[rows], "response_mask": mask[rows]}
        stage = rollout_stage(spec, **columns, rollout_log_prob=batch.log_mu[rows], measure="nothing")
        step = step_stage(spec, stage, log_prob=log_prob.detach(), advantages=advantages[rows])
        loss, _ = compute_policy_loss_vanilla(
            old[rows], log_prob, advantages[rows], mask[rows].float(), config=config,
            rollout_is_weights=step.weight * step.keep,
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), _LARGEST_GRADIENT)
        optimizer.step()


# --- evaluation of the runs

Scores = Mapping[tuple[str, float, float], Sequence[float]]
"""(arm, eta, rate) -> the score of each seed."""
CONFIDENCE = 0.9
MOST_OF_BYPASS, LEAST_OF_DECOUPLED = 0.5, 0.7
LOOKS = {
    "bypass": ("#d97706", "bypass: clip around mu"),
    "resampling": ("#7b8794", "resampling: pi_old recomputed, no weight"),
    "decoupled_ppo": ("#2563eb", "decoupled_ppo: pi_old recomputed, weight capped at 5"),
}
"""Arm -> colour and label of its line."""


def list_runs(seeds: int) -> Iterator[Run]:
    """List all runs; at eta 0, mu equals pi_old and all arms are equal."""
    for seed in range(seeds):
        for rate in RATES:
            yield Run(ARMS[0], 0, rate, seed)
            yield from (Run(arm, eta, rate, seed) for arm in ARMS for eta in ETAS if eta)


def measure(seeds: int, processes: int) -> Scores:
    """Train all runs and collect the scores of each setting."""
    runs = list(list_runs(seeds))
    scores: dict[tuple[str, float, float], list[float]] = {}
    with ProcessPoolExecutor(processes) as pool:
        for run, score in zip(runs, pool.map(train, runs), strict=True):
            for arm in (run.arm,) if run.eta else ARMS:
                scores.setdefault((arm, run.eta, run.rate), []).append(score)
    return scores


def compute_ratio(scores: Sequence[float], synchronous: Sequence[float]) -> tuple[str, float, float]:
    """Compute the ratio of means with its interval, by a percentile bootstrap over the seeds of both settings.

    Returns:
        The ratio and its interval as text, and both ends of the interval.
    """
    rng = np.random.default_rng(0)
    low, high = find_percentiles(draw_means(rng, scores) / draw_means(rng, synchronous), CONFIDENCE)
    return f"{np.mean(scores) / np.mean(synchronous):.2f} [{low:.2f}, {high:.2f}]", low, high


def check_claims(scores: Scores) -> list[str]:
    """Check that, at eta 8, training collapses with clipping around mu but not with decoupled PPO; return sentences.

    Raises:
        ClaimError: a claim does not hold over its whole interval.
    """
    sentences = []
    for rate in RATES:
        naive, _, high = compute_ratio(scores["bypass", 8, rate], scores["bypass", 0, rate])
        sentence = f"rate {rate:g}: bypass at eta 8 reaches {naive} of synchronous training, at most {MOST_OF_BYPASS}"
        require(high <= MOST_OF_BYPASS, sentence)
        decoupled, low, _ = compute_ratio(scores["decoupled_ppo", 8, rate], scores["decoupled_ppo", 0, rate])
        sentences += [sentence, f"decoupled_ppo reaches {decoupled} of it, at least {LEAST_OF_DECOUPLED}"]
        require(low >= LEAST_OF_DECOUPLED, ", but ".join(sentences[-2:]))
    return sentences


def report(scores: Scores) -> None:
    """Print one table per rate: mean scores, with the ratio to synchronous training and its interval in brackets."""
    for rate in RATES:
        print(f"Mean reward after {STEPS} steps, learning rate {rate:g}, and its share of the reward at eta 0\n")
        rows = []
        for arm in ARMS:
            found = [scores[arm, eta, rate] for eta in ETAS]
            rows.append((arm, *(f"{np.mean(each):.2f}, {compute_ratio(each, found[0])[0]}" for each in found)))
        headings = ("no bound" if math.isinf(eta) else f"eta {eta:g}" for eta in ETAS)
        print("\n".join([*format_markdown(("correction", *headings), rows), ""]))


def draw(scores: Scores, path: Path) -> None:
    """Write a PNG with one panel per rate. Lines show means over seeds; points show the seeds."""
    figure, panels = create_axes(1, len(RATES), width=5 * len(RATES), height=4.4, sharey=True)
    for axes, rate in zip(panels, RATES, strict=True):
        for arm, (colour, label) in LOOKS.items():
            levels = {eta: scores[arm, eta, rate] for eta in ETAS}
            draw_levels(axes, levels, ETAS, np.mean, color=colour, label=label)
        axes.set_xticks(range(len(ETAS)), ["none" if math.isinf(eta) else f"{eta:g}" for eta in ETAS])
        axes.set(title=f"Learning rate {rate:g}", xlabel="eta: batches that sampling is ahead by", ylim=(0, 1))
    panels[0].set_ylabel(f"mean reward after {STEPS} steps")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    save(figure, path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser(__doc__)
    add_counts(parser, seeds=5, processes=2)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "staleness.png")
    options = parser.parse_args(arguments)
    scores = measure(options.seeds, options.processes)
    report(scores)
    draw(scores, options.out)
    print(f"picture: {os.path.relpath(options.out)}")
    try:
        print("\n".join(f"holds: {sentence}" for sentence in check_claims(scores)))
    except ClaimError as error:
        print(f"DOES NOT HOLD: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
