"""Corrections in verl's keys make the same decisions as verl's installed helper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from tests.support.examples import at_most
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_and_rejection_mask,
)

from_verl = CorrectionSpec.from_verl

PRESETS = sorted(name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod))
THRESHOLDS = {
    "token_k1": "0.8_1.1",
    "token_k2": "0.02",
    "token_k3": "0.02",
    "seq_sum_k1": "0.4_1.5",
    "seq_sum_k2": "0.3",
    "seq_sum_k3": "0.3",
    "seq_mean_k1": "0.97_1.005",
    "seq_mean_k2": "0.01",
    "seq_mean_k3": "0.01",
    "seq_max_k2": "0.05",
    "seq_max_k3": "0.05",
}


def verl_batch(seed: int = 0, rows: int = 48, width: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """pi_old, mu and mask; rows drift by 1e-4 to 1 nats per token, so every bound separates them."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (-4 * torch.rand(rows, 1, generator=generator, dtype=torch.float64))
    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    mu = old + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    return old, mu, mask


def verl_coefficients(config: Any, old: Tensor, mu: Tensor, mask: Tensor) -> Tensor:
    """weight x mask that verl's loss applies if the policy is ``old``."""
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    arguments = {name: config.get(name) for name in names if config.get(name) is not None}
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(old, mu, mask, **arguments)
    applied = not config.get("bypass_mode") or config.get("loss_type") == "reinforce"
    return kept * (weights.batch["rollout_is_weights"] if weights is not None and applied else 1.0)


def assert_like_verl(config: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    old, mu, mask = batch
    spec = from_verl(config)
    bypass = spec.proximal == "bypass"
    # In bypass mode verl hands the helper the current policy, and pi_old is mu.
    pi_old = mu if bypass else old
    stage = rollout_stage(spec, old_log_prob=pi_old, rollout_log_prob=mu, response_mask=mask)
    step = step_stage(spec, stage, log_prob=old, advantages=torch.ones(old.shape))
    got = step.weight * step.keep
    torch.testing.assert_close(got, verl_coefficients(config, old, mu, mask).to(got.dtype), rtol=1e-6, atol=1e-12)
    return got


@pytest.mark.parametrize("preset", PRESETS)
def test_verl_presets_decide_the_same(preset: str) -> None:
    got = assert_like_verl(getattr(RolloutCorrectionConfig, preset)(), verl_batch())
    _, _, mask = verl_batch()
    inert = preset in ("disabled", "bypass_ppo_clip")
    assert torch.equal(got, mask.to(got.dtype)) == inert
    if "rs" in preset or "icepop" in preset:
        dropped = mask & (got == 0)
        assert dropped.any()
        assert (mask & ~dropped).any()


def test_every_rejection_option_of_the_installed_verl_is_known() -> None:
    assert set(THRESHOLDS) == SUPPORTED_ROLLOUT_RS_OPTIONS


@settings(max_examples=at_most(100))
@given(
    st.fixed_dictionaries(
        {
            "rollout_is": st.sampled_from([None, "token", "sequence"]),
            "rollout_is_threshold": st.sampled_from([1.5, 2, "2.0", "0.5_5.0", "0.9_1.1", " 0.25_4 "]),
        }
    ),
    st.lists(st.sampled_from(sorted(THRESHOLDS)), max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_verl_combinations_decide_the_same(
    weight: dict[str, Any], options: list[str], each: bool, bypass: bool, last: bool, seed: int
) -> None:
    config: dict[str, Any] = dict(weight, bypass_mode=bypass)
    if bypass:
        config["loss_type"] = "reinforce" if last else "ppo_clip"
    elif weight["rollout_is"] is not None:
        config["rollout_is_batch_normalize"] = last
    if options:
        distinct = list(dict.fromkeys(options))
        config["rollout_rs"] = ", ".join(options)
        config["rollout_rs_threshold"] = ",".join(THRESHOLDS[o] for o in distinct) if each else 1.2
    assert_like_verl(config, verl_batch(seed, rows=12, width=10))


def test_verl_defaults_are_those_of_the_installed_yaml() -> None:
    import verl

    path = f"{verl.__path__[0]}/trainer/config/algorithm/rollout_correction.yaml"
    yaml = OmegaConf.load(path)
    assert from_verl(yaml).is_none
    for keys in ({"rollout_is": "token"}, {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 1.0}):
        assert from_verl(OmegaConf.merge(yaml, keys)) == from_verl(keys)
