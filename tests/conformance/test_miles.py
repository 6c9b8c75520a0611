"""miles' own policy loss, which slime shares, and its arguments.

The converter also reads the keys of ``mis.py``, an example that is in both repositories but in neither package.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.dialects import PEERS
from recipe.offpolicy.worker.terms import choose_surrogate
from tests.support.conformance import Loss, Options, Rows, compare, install, load, our_loss

pytestmark = pytest.mark.extended

LOSS = "miles.backends.training_utils.loss"
GRID: dict[str, list[Any]] = {
    "use_rollout_logprobs": [False, True],
    "use_tis": [False, True],
    "tis_clip": [1.2, 3.0],
    "tis_clip_low": [0.0, 0.8],
    "custom_tis_function_path": [None, f"{LOSS}.icepop_function"],
    "get_mismatch_metrics": [False, True],
    "use_opsm": [False, True],
    "opsm_delta": [1e-4, 0.1],
    "use_kl_loss": [False, True],
    "kl_loss_coef": [0.0, 0.1],
    "use_unbiased_kl": [False, True],
    "advantage_estimator": ["grpo", "gspo"],
    "calculate_per_token_loss": [False, True],
}
OF_MIS_YAML = {key for key in PEERS["miles"].read if key.startswith(("rs_", "tis_")) and key not in GRID} | {"use_rs"}


@pytest.fixture(scope="module")
def folder() -> Path:
    return install("miles")


@pytest.fixture(scope="module")
def losses(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        module = load(folder, LOSS, "miles.utils", "miles.backends", "miles.backends.training_utils")
        cp = load(folder, f"{LOSS.rpartition('.')[0]}.cp_utils")
        alone = SimpleNamespace(cp=SimpleNamespace(rank=0, size=1, group=None))
        for each in (module, cp):
            patch.setattr(each, "get_parallel_state", lambda: alone)
        # Compiled by inductor, which takes minutes.
        patch.setattr(module, "compute_policy_loss", module.compute_policy_loss._torchdynamo_orig_callable)
        yield module


def theirs(losses: Any, options: Options, rows: Rows) -> Loss:
    defaults = {key: value for key, value in PEERS["miles"].read.items() if key not in OF_MIS_YAML}
    args = SimpleNamespace(
        **defaults | options,
        eps_clip=0.2,
        eps_clip_high=0.2,
        entropy_coef=0.0,
        qkv_format="thd",
        kl_loss_type="low_var_kl",
    )
    without_function = args.get_mismatch_metrics and args.custom_tis_function_path is None
    if without_function or (args.use_rollout_logprobs and args.use_tis):
        raise ValueError("refused by its parse_args")
    counts = [rows.mask.shape[1]] * len(rows.mask)
    names = {"advantages": rows.advantages, "log_probs": rows.old, "loss_masks": rows.mask.double()}
    names |= {"rollout_log_probs": rows.mu, "ref_log_probs": rows.ref}
    batch: dict[str, Any] = {name: list(values) for name, values in names.items()}
    batch |= dict(response_lengths=counts, total_lengths=counts, unconcat_tokens=None)
    mean = losses.get_sum_of_sample_mean(counts, counts, batch["loss_masks"], args.calculate_per_token_loss)
    count = rows.tokens if args.calculate_per_token_loss else len(rows.mask)

    def compute(pi: Tensor) -> Tensor:
        losses.get_log_probs_and_entropy = lambda *_, **__: {"log_probs": list(pi)}
        return losses.policy_loss_function(args, batch, None, mean)[0] / count

    return compute


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    by_token = options.get("calculate_per_token_loss", False)
    mode = "gspo" if options.get("advantage_estimator") == "gspo" else "vanilla"
    policy = our_loss(spec, rows, mode=mode, aggregation="token-mean" if by_token else "seq-mean-token-mean")
    coefficient = options.get("kl_loss_coef", 0.0) if options.get("use_kl_loss") else 0.0
    surrogate = choose_surrogate(spec)
    old = rows.mu if spec.proximal == "bypass" else rows.old

    def compute(pi: Tensor) -> Tensor:
        log = rows.ref - pi
        kl = torch.exp(log) - log - 1
        if surrogate is not None:
            kl = surrogate(pi, old, rows.mu, rows.ref, "low_var_kl")
        row = (kl * rows.mask).sum(-1)
        mean = row.sum() / rows.tokens if by_token else (row / rows.mask.sum(-1)).mean()
        return policy(pi) + coefficient * mean

    return compute


def test_policy_loss(losses: Any) -> None:
    compare("miles", GRID, functools.partial(theirs, losses), ours, draws=1500)
