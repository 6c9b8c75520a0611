"""Composed configurations, as a running Hydra application would see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.composed import Composed, copy_config
from tests.support.paths import ROOT
from verl_patches.execution_path import LivePath

CONFIGS = ROOT / "configs"
_FOLDER = CONFIGS / "correction"
OPTIONS = sorted(path.relative_to(_FOLDER).with_suffix("").as_posix() for path in _FOLDER.rglob("*.yaml"))
# What verl itself demands of a launch.
NEEDED = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
)
# The budgets that options leave to the user.
DELTAS = {
    "paper/deepseek_v32_opsm": ["correction.masks.opsm.delta=0.1"],
    "opsm": ["correction.masks.opsm.delta=0.1"],
    "opsm_factored": ["correction.masks.opsm_mismatch.delta=0.1", "correction.masks.opsm_staleness.delta=0.1"],
    "opsm_token": ["correction.masks.opsm.delta=0.1"],
}


@contextmanager
def application(*overrides: str, primary: str = "offpolicy_trainer", folder: Path = CONFIGS) -> Iterator[DictConfig]:
    """Compose the configuration inside a Hydra application."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base=None):
        config = compose(primary, overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        try:
            yield config
        finally:
            HydraConfig.instance().cfg = None


def without_verl(folder: Path) -> Path:
    """Write our primary configuration without verl's, which composes in a tenth of the time, and return its folder."""
    config = OmegaConf.load(CONFIGS / "offpolicy_trainer.yaml")
    assert isinstance(config, DictConfig)
    # The last is chosen by a group of verl's.
    verls = ("ppo_trainer", {"optional router_replay": "${model_engine}"})
    config.defaults = [default for default in OmegaConf.to_container(config.defaults) if default not in verls]
    config.hydra.searchpath = []
    OmegaConf.save(config, folder / "offpolicy_trainer.yaml")
    for path in CONFIGS.iterdir():
        if path.name != "offpolicy_trainer.yaml":
            (folder / path.name).symlink_to(path)
    return folder


def changed(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    """Return a copy with values set by dotted key, as overrides would set them."""
    config = copy_config(config)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def composed(config: DictConfig, spec: CorrectionSpec | None = None, path: LivePath | None = None) -> Composed:
    """Return a configuration as the checks read it, with another correction, or for another path."""
    run = Composed(config, spec)
    if path is not None:
        run.path = path
    return run
