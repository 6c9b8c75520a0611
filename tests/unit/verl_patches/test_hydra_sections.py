"""Our sections come with an option of ours, before the user's own values, and never without an option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from verl_patches.hydra_sections import bring_sections

PRIMARY = "a: {b: 1}\noffpolicy: {staleness: {eta: 4}}\n"


@pytest.fixture
def composed(tmp_path: Path) -> Any:
    (tmp_path / "mine.yaml").write_text(PRIMARY)

    def build(*overrides: str, hydra: bool = False) -> DictConfig:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(tmp_path), version_base=None):
            return compose("mine", list(overrides), return_hydra_config=hydra)

    yield build
    GlobalHydra.instance().clear()


def test_an_option_brings_the_sections_and_the_users_own_values_win(composed: Any) -> None:
    config = composed("+correction@correction=[tis_token,gsm]", "correction.masks.gsm.upper=1.02")
    assert config.correction.weight.upper == 2.0
    assert config.correction.masks.gsm.upper == 1.02
    assert config.offpolicy.staleness.eta == 4
    assert config.offpolicy.watchdog.step_timeout == 1800
    assert config.a.b == 1
    assert composed("+correction@correction=gsm", "offpolicy.staleness.eta=2").offpolicy.staleness.eta == 2


def test_without_an_option_nothing_changes(composed: Any) -> None:
    bring_sections()  # again
    config = composed(hydra=True)
    assert OmegaConf.to_container(config.offpolicy) == {"staleness": {"eta": 4}}
    assert "correction" not in config
    assert not config.hydra.callbacks


def test_what_the_engine_has_to_give_stands_behind_verls_defaults_and_in_front_of_the_users_values(
    composed: Any, tmp_path: Path
) -> None:
    (tmp_path / "engine.yaml").write_text("actor_rollout_ref: {rollout: {calculate_log_probs: false, name: vllm}}\n")
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    (tmp_path / "mine.yaml").write_text("defaults: [engine, _self_]\n")
    assert OmegaConf.select(composed("+correction@correction=gsm"), key) is True
    assert OmegaConf.select(composed(), key) is False
    (tmp_path / "mine.yaml").write_text(
        "defaults: [engine, _self_]\nactor_rollout_ref: {rollout: {calculate_log_probs: false}}\n"
    )
    assert OmegaConf.select(composed("+correction@correction=gsm"), key) is False
