"""Smoke test: one update on the CPU through the installed verl, without Ray, to check that the correction is live.

    python -m recipe.offpolicy.smoke

A bigram model scores four rows. ``OffPolicyLoss`` calls verl's own ``ppo_loss`` with a truncated weight and a geometric
mask, and one optimizer step follows. Two independent checks must agree that the correction reached the gradient: a real
run's proof of life, and the gradient derived below from the formulas alone.
"""

from __future__ import annotations

import sys

from verl_patches.contract import PatchError, demand_release, installed_release

from .process_start import answer_help

if __name__ == "__main__":  # before imports that take seconds, or that fail in other releases of verl
    answer_help(__doc__)
    try:
        demand_release()
    except PatchError as error:
        sys.exit(f"offpolicy: NOT LIVE: {error}")

import logging
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

import verl
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig

from .batch import micro_batch as mb
from .batch.plan import PLAN, SharedPlan
from .batch.seals import compute_row_checksums
from .correction import CorrectionSpec
from .proof.verify import LivenessError, verify
from .worker.loss import OffPolicyLoss
from .worker.metrics import take_packets

CAP, LOWER, UPPER = 2.0, 0.8, 1.25
_GSM = {
    "ratio": "rollout",
    "level": "sequence",
    "aggregate": "geometric",
    "lower": LOWER,
    "upper": UPPER,
    "when": "any",
}
SPEC = CorrectionSpec.from_mapping(
    {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": CAP}, "masks": {"gsm": _GSM}}
)
# log pi_old - log mu per row: in one row, a single token exceeds the cap; one row as a whole exceeds the mask; two rows
# lie within both.
LOG_RATIOS = ((0.9, -0.2, -0.1, -0.3), (0.3, 0.4, 0.3), (0.1, -0.1, 0.2, 0.0, -0.1), (-0.1, 0.1))
ADVANTAGES = (1.0, -0.5, -1.5, 0.8)
VOCABULARY = 11
_TOLERANCE = 1e-5  # relative error of a gradient in float32


def run_update() -> dict[str, float]:
    """Run forward, backward, both checks and an optimizer step.

    Returns:
        The metrics of ``proof.verify.verify``, and the relative ``parameter_error``.

    Raises:
        LivenessError: the correction did not reach the gradient, or the gradient differs from the formulas.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Linear(VOCABULARY, VOCABULARY, bias=False)
        torch.nn.init.normal_(model.weight, std=2.0)
        tokens = [torch.randint(VOCABULARY, (len(row) + 1,)) for row in LOG_RATIOS]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log_probs = torch.cat([_scored(model, row) for row in tokens])
    data = _micro_batch(tokens, log_probs.detach())
    sizes = dict.fromkeys(("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"), len(LOG_RATIOS))
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_torch_compile=False, **sizes)
    loss_fn = OffPolicyLoss(SPEC, config, prove=True)
    loss, metrics = loss_fn(model_output={"log_probs": log_probs}, data=data, dp_group=None)
    loss.backward()
    sampled = compute_row_checksums(data["responses"], data["response_mask"].bool(), data[mb.ROLLOUT_LOG_PROBS])
    verdict = verify(take_packets(metrics), SPEC, sampled_rows=sampled)
    if not verdict["proved"]:
        raise LivenessError("the update had no gradient to check.")
    verdict["parameter_error"] = _judge_parameters(model, tokens)
    before = model.weight.detach().clone()
    optimizer.step()
    if torch.equal(before, model.weight):
        raise LivenessError("the optimizer's step did not change the parameters.")
    return verdict


def _judge_parameters(model: torch.nn.Linear, tokens: list[Tensor]) -> float:
    """Compute the relative error of the parameters' gradient compared with the correction's and PPO's formulas."""
    seen = model.weight.grad
    assert seen is not None
    (demanded,) = torch.autograd.grad(_by_the_formulas(model, tokens, corrected=True), model.weight)
    (plain,) = torch.autograd.grad(_by_the_formulas(model, tokens, corrected=False), model.weight)
    error = float((seen - demanded).abs().max() / demanded.abs().max())
    # The comparison is written so that NaN fails.
    if not error <= _TOLERANCE:
        uncorrected = torch.allclose(seen, plain, rtol=_TOLERANCE)
        raise LivenessError(
            f"the gradient of the parameters has a relative error of {error:.3g} compared with what weight and mask "
            f"require{': it is the uncorrected gradient' if uncorrected else ''}."
        )
    return error


def _by_the_formulas(model: torch.nn.Linear, tokens: list[Tensor], *, corrected: bool) -> Tensor:
    """Build a scalar with the loss's gradient; at pi = pi_old, PPO's ratio is 1 and its gradient is -A grad log pi."""
    total = torch.zeros(())
    for row, log_ratios, advantage in zip(tokens, LOG_RATIOS, ADVANTAGES, strict=True):
        log_ratio = torch.tensor(log_ratios)
        weight = log_ratio.exp().clamp(max=CAP)
        keep = float(LOWER <= float(log_ratio.mean().exp()) <= UPPER)
        factor = weight * keep if corrected else torch.ones_like(weight)
        total = total - (factor * advantage * _scored(model, row)[:-1]).sum()
    return total / sum(len(row) for row in LOG_RATIOS)


def _scored(model: torch.nn.Linear, row: Tensor) -> Tensor:
    """Compute (tokens,) log-probs of the next token in verl's flat layout: shifted left, with the last entry unused."""
    logits = model(torch.nn.functional.one_hot(row[:-1], VOCABULARY).to(model.weight.dtype))
    scored = logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]
    return torch.cat([scored, scored.new_zeros(1)])


def _micro_batch(tokens: list[Tensor], flat: Tensor) -> TensorDict:
    """Build the micro-batch in verl's padded layout; each row has one prompt token."""
    lengths = [len(row) for row in LOG_RATIOS]
    old = [row[:-1] for row in flat.split([length + 1 for length in lengths])]
    mu = [row - torch.tensor(ratio) for row, ratio in zip(old, LOG_RATIOS, strict=True)]
    mask = _padded([torch.ones(length, dtype=torch.int64) for length in lengths])
    prompts = torch.stack([row[:1] for row in tokens])
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": _padded([row[1:] for row in tokens]),
            "attention_mask": torch.cat([torch.ones_like(prompts), mask], dim=-1),
            "response_mask": mask,
            "old_log_probs": _padded(old),
            mb.ROLLOUT_LOG_PROBS: _padded(mu),
            "advantages": _padded([torch.full((n,), a) for n, a in zip(lengths, ADVANTAGES, strict=True)]),
        },
        batch_size=len(lengths),
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(lengths), global_batch_size=len(lengths))
    tu.assign_non_tensor(data, **{PLAN: SharedPlan(step=1)})
    return data


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def main() -> None:
    logging.getLogger("verl").setLevel(logging.ERROR)
    through = f"through verl {installed_release('verl')} in {Path(verl.__file__).parent}"
    try:
        verdict = run_update()
    except LivenessError as error:
        sys.exit(f"offpolicy: NOT LIVE {through}: {error}")
    print(  # noqa: T201
        f"offpolicy: weight, masks.gsm LIVE {through}: "
        f"{verdict['gradient_tokens']:.0f} tokens, error at the log-probs {verdict['gradient_error']:.1e}, "
        f"at the parameters {verdict['parameter_error']:.1e}, one optimizer step.",
        flush=True,
    )


if __name__ == "__main__":
    main()
