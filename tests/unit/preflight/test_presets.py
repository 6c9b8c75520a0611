"""The options of the group ``correction``: each is what its paper or framework recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import CONFIGS, DELTAS, OPTIONS, application
from tests.support.corrections import GSM, TIS, band, opsm
from tests.support.examples import each_nth_by_default
from verl.trainer.config.algorithm import RolloutCorrectionConfig

from_trl, from_verl = CorrectionSpec.from_trl, CorrectionSpec.from_verl

FACTORIES = [option.removeprefix("verl/") for option in OPTIONS if option.startswith("verl/")]


def loaded(option: str, **changes: Any) -> CorrectionSpec:
    """One option by itself, with 0.1 for the budgets that it does not set."""
    config = OmegaConf.load(CONFIGS / "correction" / f"{option}.yaml")
    for override in DELTAS.get(option, []):
        key, value = override.removeprefix("correction.").split("=")
        OmegaConf.update(config, key, float(value))
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    values: Any = OmegaConf.to_container(config)
    return CorrectionSpec.from_mapping(values)


def weight(level: str, kind: str, lower: float | None, upper: float | None, **more: Any) -> dict[str, Any]:
    return {"weight": TIS | {"level": level, "kind": kind, "lower": lower, "upper": upper} | more}


def masks(**masks: dict[str, Any]) -> dict[str, Any]:
    return {"masks": masks}


EXPECTED: dict[str, dict[str, Any]] = {
    "none": {},
    "auto": {},
    "resampling": {},
    "verl/disabled": {},
    "bypass": {"proximal": "bypass"},
    "reuse": {"proximal": "reuse"},
    "same_engine": {"proximal": "same_engine"},
    "loglinear": {"proximal": "loglinear", "alpha": 0.5},
    "kl_clip": {"kl_clip": {"lower": 0.8, "upper": 1.2}},
    "log_ratio_penalty": {"penalty": {"ratio": "full", "coefficient": 0.001}},
    "loglinear_by_age": {"proximal": "loglinear", "alpha": "by_age"},
    "kl_unbiased": {"kl_weight": {"ratio": "ppo", "upper": None}},
    "tis_token": weight("token", "truncate", None, 2.0),
    "paper/topr": {
        "weights": {
            "negative": weight("sequence", "truncate", None, 1.0, ratio="full")["weight"] | {"when": "negative"}
        },
        "proximal": "bypass",
    },
    "tis_token_clip": weight("token", "clip", 0.2, 5.0),
    "tis_sequence": weight("sequence", "truncate", None, 5.0),
    "tis_geometric": weight("sequence", "truncate", None, 5.0, aggregate="geometric"),
    "tis_turn": weight("turn", "truncate", None, 5.0),
    "paper/vespo": {
        "weights": {
            when: dict(level="sequence", kind="gamma", power=power, rate=rate, ratio="full", when=when)
            for when, power, rate in (("positive", 2.0, 3.0), ("negative", 3.0, 2.0))
        },
        "proximal": "bypass",
    },
    "tis_prefix": weight("prefix", "truncate", None, 5.0),
    "suffix_veto": masks(suffix_veto=band(1e-4, None, level="prefix", aggregate="any", when="negative")),
    "paper/ctpo": {"weight": weight("prefix", "clip", 0.975309912, 1.051271096)["weight"] | {"by_position": 0.5}},
    "paper/score_centering": {"centering": 20},
    "paper/minpro": weight("prefix", "truncate", None, 2.0, aggregate="minimum"),
    "paper/dppo_kl": masks(
        dppo_kl=band(
            None, 0.05, ratio="full", level="token", aggregate="binary_kl_forward", when="outward", sign="token"
        )
    ),
    "openrlhf/flash_reinforce": weight("token", "truncate", None, None)
    | masks(binary_kl=band(None, 3e-3, aggregate="binary_kl_forward_mean")),
    "mis_token": weight("token", "reject", 0.5, 5.0),
    "mis_sequence": weight("sequence", "reject", 0.5, 2.0),
    "decoupled_ppo": weight("token", "truncate", None, 5.0),
    "gsm": masks(gsm=GSM),
    "gsm_turn": masks(gsm_turn=GSM | {"level": "turn"}),
    "product_mask": masks(product=band(0.5, 2.0, aggregate="product")),
    "outlier": masks(outlier=band(1e-4, 100.0, aggregate="any")),
    "icepop": masks(icepop=band(0.5, 2.0, level="token", aggregate="product")),
    "openrlhf/icepop": masks(icepop=band(0.5, 5.0, level="token", aggregate="product")),
    "k3_mask": masks(k3=band(None, 0.01, aggregate="k3_mean")),
    "paper/m2po": masks(m2po=dict(ratio="rollout", level="token", aggregate="second_moment", budget=0.04, when="any")),
    "paper/dppo_tv": masks(
        dppo_positive=band(
            None, 0.2, ratio="full", level="token", aggregate="binary_tv", when="positive", sign="token"
        ),
        dppo_negative=band(
            -0.2, None, ratio="full", level="token", aggregate="binary_tv", when="negative", sign="token"
        ),
    ),
    "paper/kpop": masks(kpop=band(None, 0.1, ratio="full", level="token", aggregate="binary_kl")),
    "nemo/outlier": masks(nemo_outlier=band(None, 2.0, aggregate="exp_abs_mean")),
    "roll/diff": masks(roll_diff=band(-0.2, 0.2, aggregate="binary_tv_mean")),
    "roll/diff_turn": masks(roll_diff_turn=band(-0.2, 0.2, level="turn", aggregate="binary_tv_mean")),
    "paper/vaco": masks(vaco=band(None, 1.0, aggregate="tv_mean", when="outward", sign="token")),
    "opsm": masks(opsm=opsm(0.1)),
    "trl/opsm": masks(opsm=opsm(0.5)),
    "opsm_token": masks(opsm=opsm(0.1, sign="token")),
    "slime/opsm": masks(opsm=opsm(1e-4, "ppo", sign="token")),
    "opsm_factored": masks(opsm_mismatch=opsm(0.1, "rollout"), opsm_staleness=opsm(0.1, "ppo")),
    "paper/yao2025_tis": weight("token", "truncate", None, 2.0),
    "paper/liu2025_mis": weight("sequence", "reject", None, 2.0),
    "paper/deepseek_v32_opsm": masks(opsm=opsm(0.1)),
    "skyrl/recommended": weight("token", "truncate", None, 2.0)
    | masks(gsm=GSM, outlier=band(1e-4, 100.0, aggregate="any")),
    "trl/default": weight("sequence", "reject", None, 3.0),
}


def test_every_option_is_held_by_a_test() -> None:
    """An option is tested by its values below, or by verl's factory after which it is named."""
    assert set(OPTIONS) == set(EXPECTED) | {f"verl/{name}" for name in FACTORIES}


@pytest.mark.parametrize("option", EXPECTED)
def test_each_option_is_what_is_published(option: str) -> None:
    assert loaded(option) == CorrectionSpec.from_mapping(EXPECTED[option])


@pytest.mark.parametrize("option", each_nth_by_default(5, OPTIONS))
def test_each_option_composes(option: str, folder: Path) -> None:
    """It sets only its own keys."""
    with application(f"correction={option}", *DELTAS.get(option, []), folder=folder) as config:
        assert Composed(config).spec == loaded(option)


# Peers ----------------------------------------------------------------------------------------------------------


def same(one: CorrectionSpec, two: CorrectionSpec) -> bool:
    """Equal except for the masks' names; bounds within rounding, because 1 / 1.001 may be rounded twice."""

    def rounded(spec: CorrectionSpec) -> dict[str, Any]:
        mapping = spec.to_mapping()
        shown = sorted(
            repr({k: round(v, 12) if isinstance(v, float) else v for k, v in mask.items()})
            for mask in mapping["masks"].values()
        )
        return mapping | {"masks": shown}

    return rounded(one) == rounded(two)


def test_every_factory_of_verl_is_an_option() -> None:
    made = {name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod)}
    assert made - {"from_dict"} == set(FACTORIES)
    assert len(FACTORIES) == 19


@pytest.mark.parametrize("name", FACTORIES)
def test_verls_factories(name: str) -> None:
    factory = getattr(RolloutCorrectionConfig, name)
    assert same(loaded(f"verl/{name}"), from_verl(factory()))
