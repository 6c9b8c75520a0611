"""A launch of verl's own program is checked before verl begins, and its workers get our hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("verl")

OWN = """
import hydra, json, os
from omegaconf import OmegaConf

@hydra.main(config_path={folder!r}, config_name="ppo_trainer", version_base=None)
def main(config):
    print(json.dumps(OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env)))
    print("trains with", OmegaConf.select(config, "correction.masks"), OmegaConf.select(config, "offpolicy.hooked"))

main()
"""
NEEDED = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)


def launch(folder: Path, *overrides: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Launch a user's own main program with verl's configuration, after running the code ``before``."""
    import verl.trainer.config

    (folder / "own.py").write_text(before + OWN.format(folder=str(Path(verl.trainer.config.__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "own.py", *NEEDED, *overrides]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_an_own_main_trains_corrected_by_one_override(tmp_path: Path) -> None:
    done = launch(tmp_path, "+correction@correction=[tis_token,gsm]", "correction.masks.gsm.upper=1.02")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all checks passed" in done.stdout
    assert "recipe.offpolicy.trainer.hooked" in done.stdout
    assert "'upper': 1.02" in done.stdout


@pytest.mark.slow
def test_what_a_check_refuses_stops_it_before_verl_begins(tmp_path: Path) -> None:
    done = launch(tmp_path, "+correction@correction=gsm", "actor_rollout_ref.rollout.calculate_log_probs=false")
    assert done.returncode == 1
    assert "actor_rollout_ref.rollout.calculate_log_probs=false: without the engine's log-probs" in done.stderr
    assert "trains with" not in done.stdout


UNINSTALLED = "import hydra_plugins; hydra_plugins.__path__ = []"
RAISING = "import verl_patches.hydra_sections as ours; ours.bring_sections = lambda: 1 / 0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "says"), [(UNINSTALLED, "config group 'correction' does not exist"), (RAISING, "ZeroDivisionError")]
)
def test_a_missing_or_broken_plugin_stops_it_before_the_program_begins(before: str, says: str, tmp_path: Path) -> None:
    done = launch(tmp_path, "+correction@correction=gsm", before=before)
    assert done.returncode == 1
    assert says in done.stderr
    assert "trains with" not in done.stdout
