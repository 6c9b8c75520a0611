"""TRL's own GRPO loss and ``GRPOConfig``."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.terms import choose_surrogate
from tests.support.conformance import Loss, Options, Rows, compare, draw_rows, importable, install, measure, our_loss
from tests.support.paths import ROOT

pytestmark = pytest.mark.extended

STEM = "vllm_importance_sampling"
GRID: dict[str, list[Any]] = {
    "use_vllm": [True, False],
    f"{STEM}_correction": [True, False],
    f"{STEM}_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    f"{STEM}_clip_max": [1.2, 3.0, None],
    f"{STEM}_clip_min": [0.3, 0.9, None],
    f"{STEM}_cap": [1.2, 3.0, None],
    "off_policy_mask_threshold": [0.0, 0.03, 0.3, None],
    "loss_type": ["dapo", "grpo", "bnpo", "dr_grpo", "sapo", "cispo"],
    "beta": [0.0, 0.1],
    "use_bias_correction_kl": [True, False],
    "importance_sampling_level": ["token", "sequence"],
}


@pytest.fixture(scope="module")
def trl() -> Any:
    with importable(install("trl")):
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    # The method also generates. Its branch that computes the importance ratios is executed by itself.
    (ratios,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and f"{STEM}_ratio = torch.exp" in ast.unparse(node.body)
        and ast.unparse(node.test) == f"self.use_vllm and self.{STEM}_correction"
    )
    return SimpleNamespace(
        config=GRPOConfig, trainer=GRPOTrainer, ratios=compile(ast.Module([ratios], []), "grpo_trainer.py", "exec")
    )


def configure(trl: Any, options: Options) -> Any:
    """Build the config with TRL's own defaults and TRL's translation of the older name, without its device checks."""
    values = {each.name: each.default for each in dataclasses.fields(trl.config)} | {"use_vllm": True} | options
    if values[f"{STEM}_cap"] is not None:
        values[f"{STEM}_clip_max"] = values[f"{STEM}_cap"]
    return SimpleNamespace(**values)


def _same(each: Tensor, **_: Any) -> Tensor:
    return each


def theirs(trl: Any, options: Options, rows: Rows) -> Loss:
    config = configure(trl, options)
    if config.importance_sampling_level == "sequence" and config.loss_type in ("sapo", "cispo"):
        raise ValueError("verl has no such loss")
    mask = rows.mask.double()
    here = SimpleNamespace(
        **{name: value for name, value in vars(config).items() if name.startswith(("vllm_imp", "off_policy", "impo"))},
        args=SimpleNamespace(**vars(config) | {"steps_per_generation": 1}),
        use_vllm=config.use_vllm,
        loss_type=config.loss_type,
        beta=config.beta,
        epsilon_low=0.2,
        epsilon_high=5.0 if config.loss_type == "cispo" else 0.2,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=mask.shape[1],
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=_same, reduce=_same, gather_for_metrics=_same),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trl.trainer.get_off_policy_mask,
        get_gamma_weights=trl.trainer.get_gamma_weights,
    )
    known = dict(self=here, torch=torch, math=math, old_per_token_logps=rows.old, sampling_per_token_logps=rows.mu)
    known |= dict(completion_mask=mask, tool_mask=None)
    exec(trl.ratios, known)
    empty = torch.zeros(len(mask), 0)
    inputs = dict(prompt_ids=empty, prompt_mask=empty, completion_ids=mask, completion_mask=mask)
    inputs |= dict(advantages=rows.advantages[:, 0], num_items_in_batch=mask.sum(), old_per_token_logps=rows.old)
    inputs |= dict(ref_per_token_logps=rows.ref)
    if config.use_vllm:
        inputs |= dict(sampling_per_token_logps=rows.mu)
        inputs |= dict(importance_sampling_ratio=known.get(f"{STEM}_ratio"))

    def compute(pi: Tensor) -> Tensor:
        here._get_per_token_logps_and_entropies = lambda *_, **__: (pi, torch.zeros_like(pi), None)
        return trl.trainer._compute_loss(here, None, inputs)

    return compute


AGGREGATIONS = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    loss = options.get("loss_type", "dapo")
    by_row = options.get("importance_sampling_level") == "sequence"
    mode = loss if loss in ("sapo", "cispo") else "gspo" if by_row else "vanilla"
    changes: dict[str, Any] = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0} if loss == "cispo" else {}
    if loss == "sapo":
        changes |= {"tau_pos": 1.0, "tau_neg": 1.05}
    aggregation = AGGREGATIONS.get(loss, "token-mean")
    policy = our_loss(spec, rows, mode=mode, aggregation=aggregation, **changes)
    beta = options.get("beta", 0.0)
    surrogate = choose_surrogate(spec)

    def compute(pi: Tensor) -> Tensor:
        if not beta:
            return policy(pi)
        log = rows.ref - pi
        kl = torch.exp(log) - log - 1
        if surrogate is not None:
            kl = surrogate(pi, rows.old, rows.mu, rows.ref, "low_var_kl")
        by_sequence = (kl * rows.mask).sum(-1)
        mean = (by_sequence / rows.mask.sum(-1)).mean() if loss in ("grpo", "sapo") else by_sequence.sum() / rows.tokens
        if loss == "dr_grpo":
            mean = by_sequence.sum() / rows.mask.numel()
        return policy(pi) + beta * mean

    return compute


def test_grpo_loss(trl: Any) -> None:
    compare("trl", GRID, functools.partial(theirs, trl), ours, draws=600)


@pytest.mark.parametrize("constants", [{}, {"vespo_k_pos": 1.5, "vespo_lambda_pos": 1.0, "vespo_lambda_neg": 4.0}])
def test_vespo_with_mu_as_pi_old(trl: Any, constants: dict[str, float]) -> None:
    """Without an engine, TRL's weight uses pi / pi_old; ``paper/vespo`` uses pi / mu."""
    plain = yaml.safe_load((ROOT / "configs/correction/paper/vespo.yaml").read_text())
    for sign in ("pos", "neg"):
        part = plain["weights"]["positive" if sign == "pos" else "negative"]
        part["power"] = constants.get(f"vespo_k_{sign}", part["power"])
        part["rate"] = constants.get(f"vespo_lambda_{sign}", part["rate"])
    spec = CorrectionSpec.from_mapping(plain)
    for seed in range(60):
        rows = draw_rows(seed)
        rows = dataclasses.replace(rows, old=rows.mu)
        options = {"loss_type": "vespo", "use_vllm": False, **constants}
        expected = measure(theirs(trl, options, rows), rows)
        for left, right in zip(expected, measure(our_loss(spec, rows, mode="gpg"), rows), strict=True):
            assert torch.allclose(left, right, rtol=1e-6, atol=1e-6)
