"""Corrections in the keys of AReaL, TRL, SkyRL, NeMo-RL, ROLL, slime, miles, ms-swift, OpenRLHF and others.

Expected numbers follow from the rule in each framework's public source, for these rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.correction.correction_parts import PenaltySpec
from tests.support.corrections import run

LOG = math.log
RHO = [[4.0, 0.5], [1.1, 1.1]]
"""pi_old / mu. Row 0: product 2, geometric mean 1.4142; row 1: product 1.21, geometric mean 1.1."""
ROOT2 = math.sqrt(2.0)
ROWS: dict[str, Any] = {"mu": torch.zeros(2, 2), "old": [[LOG(r) for r in row] for row in RHO]}
RAW = [4.0, 0.5, 1.1, 1.1]


def factors(correction: CorrectionSpec, **rows: Any) -> list[float]:
    """Weight x keep of the four tokens."""
    step = run(correction, **ROWS | {"dtype": torch.float64} | rows)
    return (step.weight * step.keep).flatten().tolist()


def decoupled(**rejection: Any) -> CorrectionSpec:
    return CorrectionSpec.from_peer("areal", {"use_decoupled_loss": True, "lr": 1e-6, "rejection_sampling": rejection})


@pytest.mark.parametrize(
    ("rejection", "expected"),
    [
        # Masked tokens have weight 0, and kept ones their own ratio: 5 is the default.
        ({}, RAW),
        ({"upper": 2.0}, [0.0, 0.5, 1.1, 1.1]),
        ({"action": "clamp", "upper": 2.0, "lower": 0.8}, [2.0, 0.8, 1.1, 1.1]),
        # By sequence every token has the row's geometric mean.
        ({"level": "sequence", "upper": 1.3}, [0.0, 0.0, 1.1, 1.1]),
        ({"level": "sequence", "upper": 1.3, "action": "clamp"}, [1.3, 1.3, 1.1, 1.1]),
        # agg sum and max judge by another number and leave the geometric mean as the weight.
        ({"level": "sequence", "agg": "sum", "upper": 1.9}, [0.0, 0.0, 1.1, 1.1]),
        # Divergences judge, and tokens keep their own ratio. k1 is log r: row means 0.3466 and 0.0953.
        ({"metric": "kl_k1", "level": "sequence", "upper": 0.3}, [0.0, 0.0, 1.1, 1.1]),
        ({"metric": "kl_k1", "upper": 0.5, "lower": -0.5}, [0.0, 0.0, 1.1, 1.1]),
        # k2 is (log r)^2 / 2: 0.9609 and 0.2402, mean 0.6006; 0.0045.
        ({"metric": "kl_k2", "upper": 0.3}, [0.0, 0.5, 1.1, 1.1]),
    ],
)
def test_areal(rejection: dict[str, Any], expected: list[float]) -> None:
    assert factors(decoupled(**rejection)) == pytest.approx(expected, rel=1e-6)


def test_areals_sources_of_pi_old() -> None:
    from_areal = partial(CorrectionSpec.from_peer, "areal")
    assert from_areal({}).proximal == "bypass"
    assert from_areal({"recompute_logprob": True}) == CorrectionSpec()
    assert from_areal({"use_decoupled_loss": True}) == CorrectionSpec()
    loglinear = from_areal({"use_decoupled_loss": True, "prox_logp_method": "loglinear"})
    assert (loglinear.proximal, loglinear.alpha) == ("loglinear", "by_age")


STEM = "vllm_importance_sampling"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # The default drops rows whose product exceeds 3, and keeps the product as the weight of the others.
        ({}, [2.0, 2.0, 1.21, 1.21]),
        ({f"{STEM}_correction": False}, [1.0] * 4),
        ({f"{STEM}_mode": "token_truncate", f"{STEM}_clip_max": 2.0, f"{STEM}_clip_min": 0.7}, [2.0, 0.7, 1.1, 1.1]),
        ({f"{STEM}_mode": "token_mask", f"{STEM}_clip_min": 0.7}, [0.0, 0.0, 1.1, 1.1]),
        ({f"{STEM}_mode": "sequence_truncate", f"{STEM}_clip_max": 1.5}, [1.5, 1.5, 1.21, 1.21]),
        ({f"{STEM}_mode": "sequence_mask", f"{STEM}_clip_max": 1.5}, [0.0, 0.0, 1.21, 1.21]),
    ],
)
def test_trl(fields: dict[str, Any], expected: list[float]) -> None:
    assert factors(CorrectionSpec.from_trl(fields)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("advantage", "kept"), [(-1.0, [0.0, 0.0, 1.0, 1.0]), (0.0, [1.0] * 4), (1.0, [1.0] * 4)])
def test_trls_opsm(advantage: float, kept: list[float]) -> None:
    """mean log(mu / pi) is 0.1 in row 0 and 0.04 in row 1; above 0.05, a row with A < 0 is dropped."""
    opsm = CorrectionSpec.from_trl({"off_policy_mask_threshold": 0.05, f"{STEM}_correction": False})
    pi = [[-0.3, 0.1], [-0.02, -0.06]]
    assert factors(opsm, old=pi, pi=pi, advantages=advantage) == kept


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, [1.0] * 4),
        ({"tis_ratio_type": "token"}, [2.0, 0.5, 1.1, 1.1]),
        ({"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5}, [1.5, 1.5, 1.21, 1.21]),
        ({"outlier_token_is_threshold_high": 3.0}, [0.0, 0.0, 1.0, 1.0]),
        ({"token_mask_is_threshold_low": 0.4, "token_mask_is_threshold_high": 2.0}, [0.0, 1.0, 1.0, 1.0]),
        # [0.99, 1.01] is the default band of geometric means.
        ({"sequence_mask_metric": "geometric"}, [0.0] * 4),
    ],
)
def test_skyrl(section: dict[str, Any], expected: list[float]) -> None:
    assert factors(CorrectionSpec.from_skyrl(section)) == pytest.approx(expected, rel=1e-6)


def test_skyrls_sequence_statistics_see_what_the_token_mask_left() -> None:
    """Ratios e^0.25, e^1.5, e^-1.75 multiply to 1; without the two outside [0.5, 2], the product is e^0.25 = 1.284."""
    keys = {"tis_ratio_type": "sequence", "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    found = factors(CorrectionSpec.from_skyrl(keys), mu=torch.zeros(1, 3), old=[[0.25, 1.5, -1.75]])
    assert found == pytest.approx([math.exp(0.25), 0.0, 0.0])


IS: dict[str, Any] = {"use_importance_sampling_correction": True}
ROW_LIMIT = "grpo.seq_logprob_error_threshold"
TYPE, RATIO = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({}, [1.0] * 4),
        (IS, RAW),
        (IS | {"sequence_level_importance_ratios": True}, [2.0, 2.0, 1.21, 1.21]),
        (IS | {TYPE: "tis", RATIO: 2.0, f"{RATIO}_min": 0.6}, [2.0, 0.6, 1.1, 1.1]),
        (IS | {TYPE: "icepop", RATIO: 5.0, f"{RATIO}_min": 0.6}, [4.0, 0.0, 1.1, 1.1]),
        # The row's geometric mean is 1.4142; what is kept keeps raw token weights.
        (IS | {TYPE: "seq-mask-tis", RATIO: 1.2, f"{RATIO}_min": 0.9}, [0.0, 0.0, 1.1, 1.1]),
    ],
)
def test_nemo_rl(loss: dict[str, Any], expected: list[float]) -> None:
    assert factors(CorrectionSpec.from_peer("nemo_rl", loss)) == pytest.approx(expected, rel=1e-6)


def test_nemo_rls_outlier_rule() -> None:
    """Mean exp|log rho| is (4 + 2) / 2 = 3 in row 0 and 1.1 in row 1; dropped rows leave the counts."""
    outlier = CorrectionSpec.from_peer("nemo_rl", {"loss_fn": IS | {TYPE: "tis", RATIO: 2.0}, ROW_LIMIT: 2.0})
    assert factors(outlier) == pytest.approx([0.0, 0.0, 1.1, 1.1], rel=1e-6)
    assert outlier.denominator == "kept"
    assert factors(CorrectionSpec.from_peer("nemo_rl", {ROW_LIMIT: 3.01})) == [1.0] * 4
    assert CorrectionSpec.from_peer("nemo_rl", {"force_on_policy_ratio": True}).proximal == "reuse"


def roll(**section: Any) -> CorrectionSpec:
    return CorrectionSpec.from_peer("roll", {"enable_old_logprobs_recompute": True, "train_infer_correction": section})


def sieve(kind: str, **changes: Any) -> dict[str, Any]:
    return {"filters": [{"enabled": True, "agg_type": kind} | changes]}


# p_mu of the four tokens, so that p_old = rho p_mu: 0.8, 0.3, 0.55 and 0.33; differences 0.6, -0.3, 0.05 and 0.03.
P_MU = torch.tensor([[0.2, 0.6], [0.5, 0.3]], dtype=torch.float64)
DIFF: dict[str, Any] = {"ratio_enabled": False, "diff_enabled": True}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, [1.0] * 4),
        # The cap of 1.2 is the default; the geometric mean of row 0 is 1.4142, its product 2.
        ({"is_weight": {"enabled": True}}, [1.2, 0.5, 1.1, 1.1]),
        ({"is_weight": {"enabled": True, "weight_type": "geometric", "upper_bound": None}}, [ROOT2, ROOT2, 1.1, 1.1]),
        ({"is_weight": {"enabled": True, "weight_type": "sequence"}}, [1.2, 1.2, 1.2, 1.2]),
        # [0.8, 1.2] is the default band of ratios.
        (sieve("token"), [0.0, 0.0, 1.0, 1.0]),
        (sieve("sequence", ratio_high=1.3), [0.0, 0.0, 1.0, 1.0]),
        # [-0.2, 0.2] is the default band of differences: means 0.15 and 0.04, sums 0.3 and 0.08.
        (sieve("geometric", **DIFF), [1.0] * 4),
        (sieve("sequence", **DIFF), [0.0, 0.0, 1.0, 1.0]),
        (sieve("geometric", ratio_high=2.0, diff_enabled=True, diff_high=0.1), [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_roll(section: dict[str, Any], expected: list[float]) -> None:
    mu = P_MU.log()
    found = factors(roll(**section), mu=mu, old=mu + torch.tensor(RHO, dtype=torch.float64).log())
    assert found == pytest.approx(expected, rel=1e-6)


def test_rolls_segments_are_turns() -> None:
    """Turn 0 of row 0 is its first token, turn 1 its second token: ratios 4 and 0.5."""
    weight = roll(is_weight={"enabled": True, "weight_type": "segment", "upper_bound": 3.0})
    turns = [[0, 1], [0, 0]]
    assert factors(weight, turns=turns) == pytest.approx([3.0, 0.5, 1.1, 1.1], rel=1e-6)
    assert factors(roll(**sieve("segment", ratio_low=0.4)), turns=turns) == [0.0, 1.0, 1.0, 1.0]
    assert CorrectionSpec.from_peer("roll", {}).proximal == "reuse"


MIS = {
    "use_tis": True,
    "calculate_per_token_loss": True,
    "custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
}
RS = MIS | {"use_rs": True}


@pytest.mark.parametrize("framework", ["slime", "miles"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [1.0] * 4),
        ({"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.7}, [3.0, 0.7, 1.1, 1.1]),
        ({"use_tis": True, "tis_clip_low": 0.7, "custom_tis_function_path": "a.icepop_function"}, [0.0, 0.0, 1.1, 1.1]),
        # The lower bound is 1 / upper unless it is given.
        (MIS | {"tis_mode": "clip", "tis_upper_bound": 1.5}, [1.5, 1 / 1.5, 1.1, 1.1]),
        (MIS | {"tis_mode": "mask", "tis_lower_bound": 0.4, "tis_upper_bound": 3.0}, [0.0, 0.5, 1.1, 1.1]),
        (MIS | {"tis_level": "geometric", "tis_upper_bound": 1.3}, [1.3, 1.3, 1.1, 1.1]),
        # The mean of min(rho, 2) over the four tokens is (2 + 0.5 + 1.1 + 1.1) / 4 = 1.175.
        (MIS | {"tis_batch_normalize": True}, [w / 1.175 for w in (2.0, 0.5, 1.1, 1.1)]),
        # Rejection by the weight's bounds [0.5, 2], of the row's geometric mean by [0.99, 1.2], and a veto below 0.6.
        (RS, [0.0, 0.5, 1.1, 1.1]),
        (RS | {"rs_level": "geometric", "rs_lower_bound": 0.99, "rs_upper_bound": 1.2}, [0.0, 0.0, 1.1, 1.1]),
        (RS | {"rs_upper_bound": 5.0, "rs_veto_threshold": 0.6}, [0.0, 0.0, 1.1, 1.1]),
    ],
)
def test_slime_and_miles(framework: str, arguments: dict[str, Any], expected: list[float]) -> None:
    assert factors(CorrectionSpec.from_peer(framework, arguments)) == pytest.approx(expected, rel=1e-6)


def test_slimes_opsm() -> None:
    """mean log(pi_old / pi) = 0.1 > 0.01 in row 0, so its token with A < 0 is dropped, and the other token stays."""
    rows: dict[str, Any] = dict(old=torch.zeros(2, 2), pi=[[-0.2, 0.0], [0.2, 0.0]])
    advantages = torch.tensor([[-1.0, 1.0], [-1.0, 1.0]])
    opsm = CorrectionSpec.from_peer("slime", {"use_opsm": True, "opsm_delta": 0.01})
    assert factors(opsm, advantages=advantages, **rows) == [0.0, 1.0, 1.0, 1.0]
    bypass = CorrectionSpec.from_peer("slime", {"use_opsm": True, "use_rollout_logprobs": True})
    mask = dict(bypass.masks)["opsm"]
    assert (bypass.proximal, mask.ratio, mask.delta) == ("bypass", "full", 1e-4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [1.2, 0.5, 1.1, 1.1]),
        ("token_mask", [0.0, 0.5, 1.1, 1.1]),
        # By sequence the row's geometric mean, 1.4142, is bounded; the mask leaves the ratios of tokens.
        ("sequence_truncate", [1.2, 1.2, 1.1, 1.1]),
        ("sequence_mask", [0.0, 0.0, 1.1, 1.1]),
    ],
)
def test_ms_swift(mode: str, expected: list[float]) -> None:
    read = partial(CorrectionSpec.from_peer, "ms_swift")
    stem = "rollout_importance_sampling_"
    weighted = read({f"{stem}mode": mode, f"{stem}threshold": 1.2, "beta": 0.0})
    assert factors(weighted) == pytest.approx(expected, rel=1e-6)
    assert dict(read({"off_policy_sequence_mask_delta": 0.1, "beta": 0.0}).masks) == {
        "opsm": dict(CorrectionSpec.from_trl({"off_policy_mask_threshold": 0.1}).masks)["opsm"]
    }


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ({}, [1.0] * 4),
        ({"enable": True, "threshold": [0.6, 3.0]}, [3.0, 0.6, 1.1, 1.1]),
        ({"enable": True, "type": "icepop"}, [4.0, 0.5, 1.1, 1.1]),
        ({"enable": True, "type": "icepop", "threshold": [0.6, 3.0]}, [0.0, 0.0, 1.1, 1.1]),
        ({"enable": True, "type": "seq-mask-tis", "threshold": [0.9, 1.2]}, [0.0, 0.0, 1.1, 1.1]),
    ],
)
def test_openrlhf(advantage: dict[str, Any], expected: list[float]) -> None:
    keys = {f"is_correction_{name}": value for name, value in advantage.items()}
    assert factors(CorrectionSpec.from_peer("openrlhf", keys)) == pytest.approx(expected, rel=1e-6)


def test_openrlhf_under_gspo_has_the_ratio_to_mu() -> None:
    gspo = {"actor.policy_loss_type": "gspo"}
    enabled = {"algo.advantage.is_correction_enable": True}
    assert CorrectionSpec.from_peer("openrlhf", enabled | gspo) == CorrectionSpec(proximal="bypass")
    assert CorrectionSpec.from_peer("openrlhf", gspo) == CorrectionSpec()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [2.0, 0.5, 1.1, 1.1]),
        ({"use_rho_correction": False}, [1.0] * 4),
        ({"rho_clamp_lower_bound": 0.7, "rho_clamp_upper_bound": 3.0}, [3.0, 0.7, 1.1, 1.1]),
        ({"rho_clamp_upper_bound": 0.0}, RAW),
        ({"rho_mask_lower_bound": 0.7, "rho_mask_upper_bound": 5.0}, [2.0, 0.0, 1.1, 1.1]),
        # By sequence clamp and mask are of the row's geometric mean, 1.4142.
        ({"rho_mask_sequence_level": True, "rho_clamp_upper_bound": 1.3}, [1.3, 1.3, 1.1, 1.1]),
        ({"rho_mask_sequence_level": True, "rho_mask_upper_bound": 1.2}, [0.0, 0.0, 1.1, 1.1]),
        # VACO: mean |rho - 1| of row 0 is (3 + 0.5) / 2 = 1.75. With A > 0 the first token leads away.
        ({"rho_mask_tv_divergence": True, "rho_mask_upper_bound": 1.7}, [0.0, 0.5, 1.1, 1.1]),
    ],
)
def test_open_instruct(fields: dict[str, Any], expected: list[float]) -> None:
    assert factors(CorrectionSpec.from_peer("open_instruct", fields)) == pytest.approx(expected, rel=1e-6)


def test_open_instruct_with_vllms_log_probs() -> None:
    assert CorrectionSpec.from_peer("open_instruct", {"use_vllm_logprobs": True}) == CorrectionSpec(proximal="bypass")
    with pytest.raises(SpecError, match="open-instruct rejects any correction"):
        CorrectionSpec.from_peer("open_instruct", {"use_vllm_logprobs": True, "use_rho_correction": True})


@pytest.mark.parametrize(
    ("loss", "advantage", "expected"),
    [
        # p_pi - p_mu is 0.6, -0.3, 0.05 and 0.03; with A > 0 only what rose by more than 0.2 is dropped.
        ({}, 1.0, [0.0, 0.5, 1.1, 1.1]),
        ({}, -1.0, [4.0, 0.0, 1.1, 1.1]),
        ({"dppo_mask_high": 0.7}, 1.0, RAW),
        ({"type": "ipo", "ipo_threshold": 0.04}, 1.0, [0.0, 0.0, 0.0, 1.1]),
        # Greater binary KL of (0.8, 0.2), (0.3, 0.6), (0.55, 0.5) and (0.33, 0.3): 0.83, 0.19, 0.005 and 0.002.
        ({"type": "kpop", "kpop_threshold": 0.2}, 1.0, [0.0, 0.5, 1.1, 1.1]),
        ({"type": "kimi_k15"}, 1.0, [1.0] * 4),
    ],
)
def test_prime_rl(loss: dict[str, Any], advantage: float, expected: list[float]) -> None:
    correction = CorrectionSpec.from_peer("prime_rl", loss)
    mu = P_MU.log()
    pi = mu + torch.tensor(RHO, dtype=torch.float64).log()
    step = run(correction, mu=mu, old=mu, pi=pi, advantages=advantage, dtype=torch.float64)
    assert (step.weight * step.keep).flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert correction.proximal == "bypass"


def test_prime_rls_penalties() -> None:
    read = partial(CorrectionSpec.from_peer, "prime_rl")
    expected = [({}, 1e-3), ({"type": "kimi_k15"}, 0.1), ({"type": "kimi_k15", "tau": 1.0}, 0.5)]
    assert [read(loss).penalty for loss, _ in expected] == [PenaltySpec("full", each) for _, each in expected]
    assert read({"kl_tau": 0.0}).penalty is None
