"""Smoke test on the CPU, in seconds, without Ray: ``python3 -m recipe.offpolicy_correction.smoke_test``.

The test makes one update of a bigram model through verl's ``ppo_loss``, with a truncated weight, a geometric mask and
off-policy sequence masking. The parameters' gradient must equal the gradient computed from the formulas, and a loss
that ignores the correction must stop the update.
"""

from __future__ import annotations

import sys

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig

from .check import NotLive
from .correction import Correction
from .loss import CorrectedLoss

CAP, LOWER, UPPER, DELTA = 2.0, 0.8, 1.25, 0.1
CONFIG = {
    "weight": {"level": "token", "kind": "truncate", "lower": None, "upper": CAP},
    "masks": {
        "gsm": {"ratio": "rollout", "level": "sequence", "aggregate": "geometric", "lower": LOWER, "upper": UPPER},
        "opsm": {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": DELTA, "when": "negative"},
    },
}
# log pi_old - log mu, with one case per row: a token beyond the cap; a row beyond gsm; a row within all bounds; a row
# beyond opsm, with A < 0.
LOG_RATIOS = ((0.9, -0.2, -0.1, -0.3), (0.3, 0.4, 0.3), (0.1, -0.1, 0.2, 0.0, -0.1), (-0.2, -0.1))
ADVANTAGES = (1.0, -0.5, -1.5, -0.8)
KEPT = (1.0, 0.0, 1.0, 0.0)
VOCABULARY = 11


def run_update(loss_class: type[CorrectedLoss] = CorrectedLoss) -> float:
    """Run forward, checks and backward; return the relative error of the parameters' gradient."""
    torch.manual_seed(0)
    model = torch.nn.Linear(VOCABULARY, VOCABULARY, bias=False)
    torch.nn.init.normal_(model.weight, std=2.0)
    tokens = [torch.randint(VOCABULARY, (len(row) + 1,)) for row in LOG_RATIOS]
    scored = [_score(model, row) for row in tokens]
    log_probs = torch.cat([torch.cat([row, row.new_zeros(1)]) for row in scored])
    rows = len(tokens)
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=rows, ppo_micro_batch_size_per_gpu=rows)
    loss_fn = loss_class(Correction.from_config(CONFIG), actor)
    data = _build_batch(tokens, [row.detach() for row in scored])
    loss, metrics = loss_fn(model_output={"log_probs": log_probs}, data=data)
    loss.backward(retain_graph=True)
    if metrics["offpolicy/live/tokens"].aggregate() == 0:
        raise NotLive("no token with a gradient was compared.")
    expected = torch.zeros(())
    for row, ratios, advantage, keep in zip(scored, LOG_RATIOS, ADVANTAGES, KEPT, strict=True):
        # At pi = pi_old, the gradient of PPO's term equals that of -A log pi.
        expected = expected - (torch.tensor(ratios).exp().clamp(max=CAP) * keep * advantage * row).sum()
    (gradient,) = torch.autograd.grad(expected / sum(map(len, LOG_RATIOS)), model.weight)
    return float((model.weight.grad - gradient).abs().max() / gradient.abs().max())


def _score(model: torch.nn.Linear, row: Tensor) -> Tensor:
    logits = model(torch.nn.functional.one_hot(row[:-1], VOCABULARY).to(model.weight.dtype))
    return logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def _build_batch(tokens: list[Tensor], old: list[Tensor]) -> TensorDict:
    """Build verl's padded micro-batch; each row has one prompt token."""
    mu = [row - torch.tensor(ratios) for row, ratios in zip(old, LOG_RATIOS, strict=True)]
    mask = _pad([torch.ones(len(row), dtype=torch.int64) for row in old])
    prompts = torch.stack([row[:1] for row in tokens])
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": _pad([row[1:] for row in tokens]),
            "attention_mask": torch.cat([torch.ones_like(prompts), mask], dim=-1),
            "response_mask": mask,
            "old_log_probs": _pad(old),
            "rollout_log_probs": _pad(mu),
            "advantages": _pad([torch.full_like(row, a) for row, a in zip(old, ADVANTAGES, strict=True)]),
        },
        batch_size=len(tokens),
    )
    count = int(mask.sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=count, global_batch_size=len(tokens))
    return data


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Uncorrected(CorrectedLoss):
    """A loss that ignores the correction, as a bug would."""

    def compute_factor(self, batch):
        factor, sums = super().compute_factor(batch)
        return torch.ones_like(factor) * batch.response_mask, sums


def main() -> None:
    error = run_update()
    if not error <= 1e-5:
        sys.exit(f"NOT LIVE: the gradient of the parameters differs from the formulas by {error:.3g}.")
    try:
        run_update(Uncorrected)
    except NotLive:
        print(f"LIVE: weight, masks.gsm and masks.opsm; error of the gradient {error:.1e}.")
    else:
        sys.exit("NOT LIVE: a loss that ignores the correction was not stopped.")


if __name__ == "__main__":
    main()
