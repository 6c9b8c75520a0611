"""Corrections in the keys of SkyRL, TRL and verl decide what these frameworks decide.

SkyRL and TRL are stated here again, token by token, from their published rules; verl is its installed helper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_and_rejection_mask,
)

from recipe.offpolicy.correction import CorrectionSpec, SpecError, rollout_stage, step_stage

from_skyrl, from_trl, from_verl = CorrectionSpec.from_skyrl, CorrectionSpec.from_trl, CorrectionSpec.from_verl

Row = tuple[list[float], list[bool]]  # log-ratios of a row's tokens, and which of them are valid


def coefficients(
    spec: CorrectionSpec, *, old: Tensor, mu: Tensor, mask: Tensor, pi: Tensor | None = None, advantages: Any = 1.0
) -> Tensor:
    """weight x keep of each token, through both stages."""
    stage = rollout_stage(spec, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    signs = torch.as_tensor(advantages, dtype=torch.float32)
    signs = signs[:, None] if signs.dim() == 1 else signs
    step = step_stage(spec, stage, log_prob=old if pi is None else pi, advantages=signs.expand(old.shape))
    return step.weight * step.keep


def rectangle(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Log-ratios and mask, padded to one width."""
    width = max(len(values) for values, _ in rows)
    log_ratio = torch.zeros(len(rows), width)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (values, valid) in enumerate(rows):
        log_ratio[i, : len(values)] = torch.tensor(values)
        mask[i, : len(valid)] = torch.tensor(valid)
    return log_ratio, mask


# Sixteenths of a nat are exact in float32, so that sums are exact and no bound below is hit by rounding.
small = st.integers(-40, 40).map(lambda n: n / 16)
log_ratios = st.one_of(small, small.map(lambda d: d / 64), st.sampled_from([-12.0, -10.0, 5.0, 6.0]))


@st.composite
def row(draw: st.DrawFn) -> Row:
    length = draw(st.integers(1, 6))
    lists = st.lists(log_ratios, min_size=length, max_size=length)
    return draw(lists), draw(st.lists(st.booleans(), min_size=length, max_size=length))


rows = st.lists(row(), min_size=1, max_size=4)


# SkyRL ---------------------------------------------------------------------------------------------------------------

SKYRL: dict[str, Any] = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.01,
    "geo_mask_low": 0.99,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


def skyrl_exp(value: float) -> np.float32:
    return np.exp(np.clip(np.float32(value), np.float32(-20), np.float32(20)), dtype=np.float32)


def skyrl_row(given_keys: Mapping[str, Any], log_ratio: list[float], valid: list[bool]) -> list[float]:
    """Outlier mask, token mask, weight, sequence mask; each sees the loss mask that the ones before it left."""
    key = SKYRL | dict(given_keys)
    mask = [float(v) for v in valid]
    ratio = [skyrl_exp(d) for d in log_ratio]
    low, high = key["outlier_token_is_threshold_low"], key["outlier_token_is_threshold_high"]
    for r, counts in zip(ratio, valid, strict=True):
        if counts and ((high is not None and r > high) or (low is not None and r < low)):
            mask = [0.0] * len(mask)
    low, high = key["token_mask_is_threshold_low"], key["token_mask_is_threshold_high"]
    if low is not None and high is not None:
        mask = [m if low <= r <= high else 0.0 for m, r in zip(mask, ratio, strict=True)]
    total = sum(d * m for d, m in zip(log_ratio, mask, strict=True))
    weight: list[float] = [1.0] * len(mask)
    if key["tis_ratio_type"] == "token":
        weight = [min(float(r), key["token_tis_ratio_clip_high"]) for r in ratio]
    elif key["tis_ratio_type"] == "sequence":
        weight = [min(float(skyrl_exp(total)), key["sequence_tis_ratio_clip_high"])] * len(mask)
    kept = True
    if key["sequence_mask_metric"] == "geometric":
        statistic = skyrl_exp(total / max(sum(mask), 1.0))
        kept = not statistic > key["geo_mask_high"] and not statistic < key["geo_mask_low"]
    elif key["sequence_mask_metric"] == "product":
        statistic = skyrl_exp(total)
        kept = not statistic > key["product_mask_high"] and not statistic < key["product_mask_low"]
    return [w * m * kept for w, m in zip(weight, mask, strict=True)]


@st.composite
def skyrl_keys(draw: st.DrawFn) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if draw(st.booleans()):
        keys["tis_ratio_type"] = draw(st.sampled_from(["token", "sequence"]))
        keys["token_tis_ratio_clip_high"] = draw(st.sampled_from([1.5, 2.0, 5.0]))
        keys["sequence_tis_ratio_clip_high"] = draw(st.sampled_from([2.0, 5.0, 10.0]))
    keys["sequence_mask_metric"] = draw(st.sampled_from([None, "geometric", "product"]))
    if draw(st.booleans()):
        keys |= {"geo_mask_high": 1.2, "geo_mask_low": 0.7, "product_mask_high": 7.0, "product_mask_low": 0.3}
    keys["outlier_token_is_threshold_low"] = draw(st.sampled_from([None, 1e-4, 0.1]))
    keys["outlier_token_is_threshold_high"] = draw(st.sampled_from([None, 100.0, 8]))
    if draw(st.booleans()):
        keys |= {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    return keys


def assert_like_skyrl(keys: dict[str, Any], data: list[Row]) -> None:
    log_ratio, mask = rectangle(data)
    got = coefficients(from_skyrl(keys), old=log_ratio, mu=torch.zeros_like(log_ratio), mask=mask)
    for i, (values, valid) in enumerate(data):
        expected = torch.tensor(skyrl_row(keys, values, valid), dtype=torch.float32)
        torch.testing.assert_close(got[i, : len(values)], expected, rtol=2e-6, atol=0)


@settings(deadline=None, max_examples=250)
@given(skyrl_keys(), rows)
def test_skyrl_decides_the_same(keys: dict[str, Any], data: list[Row]) -> None:
    assert_like_skyrl(keys, data)


def test_skyrl_sequence_statistics_see_what_the_token_mask_left() -> None:
    """Ratios e^0.25, e^1.5, e^-1.75 multiply to 1; without the two outside [0.5, 2] the rest gives e^0.25 = 1.284."""
    keys = {"tis_ratio_type": "sequence", "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    spec = from_skyrl(keys)
    assert spec.skyrl_compat
    log_ratio = torch.tensor([[0.25, 1.5, -1.75]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = coefficients(spec, old=log_ratio, mu=torch.zeros(1, 3), mask=mask)
    torch.testing.assert_close(got, torch.tensor([[math.exp(0.25), 0.0, 0.0]]))


def test_skyrl_order_is_reproduced_only_where_it_could_matter() -> None:
    outlier, token = {"outlier_token_is_threshold_high": 100}, {"token_mask_is_threshold_low": 0.5}
    token |= {"token_mask_is_threshold_high": 2.0}
    by_sequence: list[dict[str, Any]] = [{"sequence_mask_metric": "geometric"}, {"tis_ratio_type": "sequence"}]
    for later in by_sequence:
        assert not from_skyrl(later).skyrl_compat
        assert not from_skyrl(outlier | later).skyrl_compat
        assert from_skyrl(token | later).skyrl_compat
    assert not from_skyrl(outlier | token | {"tis_ratio_type": "token"}).skyrl_compat


def test_skyrl_defaults() -> None:
    assert from_skyrl({}).is_none
    assert from_skyrl(SimpleNamespace(**SKYRL)).is_none
    for level, metric in (("token", "geometric"), ("sequence", "product")):
        keys = {"tis_ratio_type": level, "sequence_mask_metric": metric}
        assert from_skyrl(keys) == from_skyrl(SKYRL | keys) == from_skyrl(OmegaConf.create(keys))


# TRL -----------------------------------------------------------------------------------------------------------------

TRL: dict[str, Any] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
}


def trl_row(
    given_keys: Mapping[str, Any], log_rho: list[float], log_r: list[float], advantage: float, valid: list[bool]
) -> list[float]:
    """log_rho = log(pi_old / mu), log_r = log(pi / pi_old); float64."""
    key = TRL | dict(given_keys)
    mask = [float(v) for v in valid]
    weight = [1.0] * len(mask)
    if key["vllm_importance_sampling_correction"]:
        level, action = key["vllm_importance_sampling_mode"].split("_")
        drift = [d * m for d, m in zip(log_rho, mask, strict=True)]
        ratio = [math.exp(sum(drift))] * len(mask) if level == "sequence" else [math.exp(d) for d in drift]
        low, high = key["vllm_importance_sampling_clip_min"], key["vllm_importance_sampling_clip_max"]
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        if action == "truncate":
            weight = [min(max(r, low), high) for r in ratio]
        else:
            weight = [r if low <= r <= high else 0.0 for r in ratio]
    keep = 1.0
    if key["off_policy_mask_threshold"] is not None:
        gap = -sum((a + b) * m for a, b, m in zip(log_rho, log_r, mask, strict=True)) / max(sum(mask), 1.0)
        keep = float(advantage >= 0 or gap <= key["off_policy_mask_threshold"])
    return [w * m * keep for w, m in zip(weight, mask, strict=True)]


trl_keys = st.fixed_dictionaries(
    {},
    optional={
        "vllm_importance_sampling_correction": st.booleans(),
        "vllm_importance_sampling_mode": st.sampled_from(
            ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
        ),
        "vllm_importance_sampling_clip_max": st.sampled_from([1.2, 2, 3.0]),
        "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.3, 0.9]),
        "off_policy_mask_threshold": st.sampled_from([None, 0.0, 0.03, 0.3]),
    },
)


@settings(deadline=None, max_examples=250)
@given(trl_keys, rows, st.data())
def test_trl_decides_the_same(keys: dict[str, Any], data: list[Row], draw: st.DataObject) -> None:
    log_rho, mask = rectangle(data)
    log_r = torch.tensor(draw.draw(st.lists(small, min_size=mask.numel(), max_size=mask.numel()))).view(mask.shape)
    advantages = draw.draw(st.lists(st.sampled_from([-1.5, 0.0, 0.5]), min_size=len(data), max_size=len(data)))
    got = coefficients(
        from_trl(keys),
        old=log_rho,
        mu=torch.zeros_like(log_rho),
        mask=mask,
        pi=log_rho + log_r,
        advantages=advantages,
    )
    for i, (values, valid) in enumerate(data):
        expected = trl_row(keys, values, log_r[i, : len(values)].tolist(), advantages[i], valid)
        # TRL's weights may fall below e^-20, ours may not.
        torch.testing.assert_close(got[i, : len(values)], torch.tensor(expected).float(), rtol=1e-5, atol=2.1e-9)


def test_trl_defaults_drop_a_row_and_keep_its_ratio_as_weight() -> None:
    """clip_max = 3: a row of product e^1 = 2.718 keeps it as weight, a row of product e^1.5 = 4.48 is dropped."""
    log_rho = torch.tensor([[0.5, 0.5], [1.0, 0.5]])
    spec = from_trl({})
    assert spec == from_trl(TRL) == CorrectionSpec.from_trl({})
    got = coefficients(spec, old=log_rho, mu=torch.zeros(2, 2), mask=torch.ones(2, 2))
    torch.testing.assert_close(got, torch.tensor([[math.e, math.e], [0.0, 0.0]]))


def test_trl_bounds_may_be_open() -> None:
    """Products e^1 = 2.718 and e^-1 = 0.368 with clip_min = 0.5 alone: the second is raised to it, or dropped."""
    log_rho = torch.tensor([[1.0], [-1.0]])
    stem = "vllm_importance_sampling"
    for mode, second in (("token_truncate", 0.5), ("token_mask", 0.0), ("sequence_mask", 0.0)):
        keys = {f"{stem}_mode": mode, f"{stem}_clip_min": 0.5, f"{stem}_clip_max": None}
        got = coefficients(from_trl(keys), old=log_rho, mu=torch.zeros(2, 1), mask=torch.ones(2, 1))
        torch.testing.assert_close(got, torch.tensor([[math.e], [second]]))


def test_trl_reads_a_config_object_and_leaves_its_other_fields_alone() -> None:
    config = SimpleNamespace(**TRL | {"off_policy_mask_threshold": 0.5}, learning_rate=1e-6)
    assert from_trl(config) == from_trl({"off_policy_mask_threshold": 0.5})
    assert from_trl({"vllm_importance_sampling_correction": False}).is_none


# verl ----------------------------------------------------------------------------------------------------------------

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
    """pi_old, mu and mask; rows drift by 1e-4 to 1 nats a token, so that any bound divides them."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (-4 * torch.rand(rows, 1, generator=generator, dtype=torch.float64))
    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    mu = old + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    return old, mu, mask


def verl_coefficients(config: Any, old: Tensor, mu: Tensor, mask: Tensor) -> Tensor:
    """weight x mask that verl's loss applies, where pi is the policy that ``old`` holds."""
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
    got = coefficients(spec, old=mu if bypass else old, mu=mu, mask=mask, pi=old)
    torch.testing.assert_close(got, verl_coefficients(config, old, mu, mask).to(got.dtype), rtol=1e-6, atol=1e-12)
    return got


def test_verl_has_nineteen_presets() -> None:
    assert len(PRESETS) == 19


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


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("option", sorted(THRESHOLDS))
def test_verl_rejection_options_decide_the_same(option: str, bypass: bool) -> None:
    config = {"rollout_rs": option, "rollout_rs_threshold": THRESHOLDS[option], "bypass_mode": bypass}
    got = assert_like_verl(config, verl_batch(1))
    _, _, mask = verl_batch(1)
    assert (mask & (got == 0)).any()
    assert (got > 0).any()


def test_every_rejection_option_of_the_installed_verl_is_known() -> None:
    assert set(THRESHOLDS) == SUPPORTED_ROLLOUT_RS_OPTIONS


@settings(deadline=None, max_examples=100)
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


@pytest.mark.parametrize(("ratio", "kept"), [(3.9, True), (2.0, True), (0.81, True), (0.79, False), (4.1, False)])
@pytest.mark.parametrize("option", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_verl_bounds_the_inverse_ratio(option: str, ratio: float, kept: bool) -> None:
    """k1 = -log r: "0.25_1.25" keeps mu / pi_old in [0.25, 1.25], which is pi_old / mu in [0.8, 4]."""
    config = {"rollout_rs": option, "rollout_rs_threshold": "0.25_1.25"}
    (_, mask_spec), *others = from_verl(config).masks
    assert others == []
    assert (mask_spec.lower, mask_spec.upper) == (0.8, 4.0)
    old, mask = torch.tensor([[math.log(ratio)]]), torch.ones(1, 1)
    assert bool(assert_like_verl(config, (old, torch.zeros(1, 1), mask)).item()) is kept


def test_verl_single_bound_is_symmetric() -> None:
    (_, mask_spec), *_ = from_verl({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.25}).masks
    assert (mask_spec.lower, mask_spec.upper) == (0.8, 1.25)


def test_verl_left_out_is_the_yaml_default_and_a_config_object_has_its_own() -> None:
    assert from_verl({}).is_none
    assert from_verl(None).is_none
    whole = from_verl(RolloutCorrectionConfig())
    assert whole.weight is not None
    assert whole.weight.level == "sequence"
    assert from_verl(SimpleNamespace(rollout_is="token")) == from_verl({"rollout_is": "token"})
    assert CorrectionSpec.from_verl({"rollout_is": "token"}) == from_verl({"rollout_is": "token"})


def test_verl_defaults_are_those_of_the_installed_yaml() -> None:
    import verl

    path = f"{verl.__path__[0]}/trainer/config/algorithm/rollout_correction.yaml"
    yaml = OmegaConf.load(path)
    assert from_verl(yaml).is_none
    for keys in ({"rollout_is": "token"}, {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 1.0}):
        assert from_verl(OmegaConf.merge(yaml, keys)) == from_verl(keys)


def test_verl_bypass_weights_of_ppo_clip_are_metrics_only() -> None:
    spec = from_verl({"bypass_mode": True, "rollout_is": "token"})
    assert spec.weight is None
    assert spec.proximal == "bypass"
    weight = from_verl({"bypass_mode": True, "rollout_is": "token", "loss_type": "reinforce"}).weight
    assert weight is not None
    assert weight.ratio == "full"


# All of them ---------------------------------------------------------------------------------------------------------

SK, TR, VE = "off_policy_correction.", "GRPOConfig.vllm_importance_sampling_", "rollout_correction."


@pytest.mark.parametrize(
    ("translate", "keys", "message"),
    [
        (from_skyrl, {"tis_ratio": "token"}, SK + "tis_ratio='token': unknown key"),
        (from_skyrl, {"tis_ratio_type": "row"}, SK + "tis_ratio_type='row': set one of null, token, sequence"),
        (from_skyrl, {"token_tis_ratio_clip_high": "2"}, SK + "token_tis_ratio_clip_high='2': expected a number"),
        (
            from_skyrl,
            {"tis_ratio_type": "token", "token_tis_ratio_clip_high": None},
            SK + "token_tis_ratio_clip_high=null",
        ),
        (from_skyrl, {"token_tis_ratio_clip_high": 1e9}, SK + "token_tis_ratio_clip_high=1000000000.0: log-ratios"),
        (from_skyrl, {"geo_mask_low": -1}, SK + "geo_mask_low=-1: ratios are positive"),
        (from_skyrl, {"sequence_mask_metric": "mean"}, SK + "sequence_mask_metric='mean'"),
        (from_skyrl, {"sequence_mask_metric": "geometric", "geo_mask_low": 1.1}, SK + "geo_mask_low=1.1 > "),
        (from_skyrl, {"sequence_mask_metric": "geometric", "geo_mask_low": None}, SK + "geo_mask_low=null with "),
        (from_skyrl, {"token_mask_is_threshold_low": 0.5}, SK + "token_mask_is_threshold_high=null with "),
        (from_skyrl, {"token_mask_is_threshold_high": 2.0}, SK + "token_mask_is_threshold_low=null with "),
        (from_skyrl, {"outlier_token_is_threshold_low": 0}, SK + "outlier_token_is_threshold_low=0: ratios"),
        (from_skyrl, "token", "off_policy_correction='token': expected a mapping"),
        (from_trl, {"vllm_importance_sampling_cap": 2}, TR + "cap=2: unknown key"),
        (from_trl, {"vllm_importance_sampling_mode": "mask"}, TR + "mode='mask': set one of token_truncate"),
        (from_trl, {"vllm_importance_sampling_mode": None}, TR + "mode=None: set one of token_truncate"),
        (from_trl, {"vllm_importance_sampling_correction": 1}, TR + "correction=1: set true or false"),
        (from_trl, {"vllm_importance_sampling_clip_max": None}, TR + "clip_max=null with "),
        (from_trl, {"vllm_importance_sampling_clip_min": 4.0}, TR + "clip_min=4.0 > "),
        (from_trl, {"vllm_importance_sampling_clip_min": 0.0}, TR + "clip_min=0.0: ratios are positive"),
        (from_trl, {"off_policy_mask_threshold": -0.1}, "GRPOConfig.off_policy_mask_threshold=-0.1: mean"),
        (from_trl, None, "GRPOConfig=None: expected a mapping"),
        (from_verl, {"rollout_token_veto_threshold": 1e-4}, VE + "rollout_token_veto_threshold=0.0001: unknown key"),
        (from_verl, {"rollout_is": "geometric"}, VE + "rollout_is='geometric': set one of null, token, sequence"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": None}, VE + "rollout_is_threshold=null with"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": 0.52}, VE + "rollout_is_threshold=0.52: a cap"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": True}, VE + "rollout_is_threshold=True"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "2_0.5"}, "'2_0.5': nothing lies between"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "1_0_2"}, "'1_0_2': set a number such as"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "nan"}, VE + "rollout_is_threshold='nan'"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "-1_2"}, "'-1_2': bounds are positive"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "1e-10_2"}, "=1e-10: log-ratios are clamped"),
        (from_verl, {"rollout_is_batch_normalize": True}, VE + "rollout_is_batch_normalize=true with"),
        (from_verl, {"rollout_is_batch_normalize": "yes"}, VE + "rollout_is_batch_normalize='yes'"),
        (
            from_verl,
            {
                "rollout_is": "token",
                "rollout_is_batch_normalize": True,
                "bypass_mode": True,
                "loss_type": "reinforce",
            },
            VE + "rollout_is_batch_normalize=true with rollout_correction.bypass_mode=true",
        ),
        (from_verl, {"rollout_rs": "token_k1"}, VE + "rollout_rs_threshold=null with"),
        (from_verl, {"rollout_rs_threshold": 2.0}, VE + "rollout_rs_threshold=2.0 with rollout_correction.rollout_rs="),
        (from_verl, {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "'seq_max_k1' is unknown"),
        (from_verl, {"rollout_rs": " , ", "rollout_rs_threshold": 2}, VE + "rollout_rs=' , ': set options"),
        (from_verl, {"rollout_rs": ["token_k1"], "rollout_rs_threshold": 2}, VE + "rollout_rs=['token_k1']"),
        (from_verl, {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.52}, "which is empty below 1. YAML"),
        (from_verl, {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_2"}, "token_k2 has an upper bound alone"),
        (from_verl, {"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"}, "2 thresholds for the 1 options"),
        (from_verl, {"rollout_rs": "token_k2", "rollout_rs_threshold": [1.0]}, VE + "rollout_rs_threshold=[1.0]"),
        (from_verl, {"loss_type": "reinforce"}, VE + "loss_type=reinforce with"),
        (from_verl, {"loss_type": "ppo"}, VE + "loss_type='ppo': set one of ppo_clip, reinforce"),
        (from_verl, {"bypass_mode": None}, VE + "bypass_mode=None: set true or false"),
        (from_verl, 3, "rollout_correction=3: expected a mapping"),
    ],
)
def test_errors_name_the_frameworks_own_key(
    translate: Callable[[Any], CorrectionSpec], keys: Any, message: str
) -> None:
    with pytest.raises(SpecError) as error:
        translate(keys)
    assert message in str(error.value)


def test_yaml_turns_an_unquoted_pair_into_a_number_that_is_refused() -> None:
    keys = OmegaConf.create("{rollout_is: token, rollout_is_threshold: 0.5_2}")
    with pytest.raises(SpecError, match="unquoted"):
        from_verl(keys)
    quoted = from_verl(OmegaConf.create("{rollout_is: token, rollout_is_threshold: '0.5_2'}")).weight
    assert quoted is not None
    assert (quoted.kind, quoted.lower, quoted.upper) == ("reject", 0.5, 2.0)
    capped = from_verl({"rollout_is": "token", "rollout_is_threshold": 25}).weight
    assert capped is not None
    assert (capped.kind, capped.upper) == ("truncate", 25.0)


@pytest.mark.parametrize("classmethod_of", ["from_skyrl", "from_trl", "from_verl"])
def test_translations_survive_a_round_trip(classmethod_of: str) -> None:
    keys: dict[str, dict[str, Any]] = {
        "from_skyrl": {"tis_ratio_type": "sequence", "outlier_token_is_threshold_low": 1e-4},
        "from_trl": {"off_policy_mask_threshold": 0.5},
        "from_verl": {"rollout_is": "token", "rollout_rs": "seq_max_k2,token_k1", "rollout_rs_threshold": 2},
    }
    spec = getattr(CorrectionSpec, classmethod_of)(keys[classmethod_of])
    assert CorrectionSpec.from_mapping(spec.to_mapping()) == spec
