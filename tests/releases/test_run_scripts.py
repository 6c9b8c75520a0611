"""recipe/offpolicy/run_*.sh in the environment of each release: they compose, and pass our checks and verl's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.support.paths import ROOT

SCRIPTS = ROOT / "recipe" / "offpolicy"
DENSE, MOE, ASYNC = "run_dense_fsdp", "run_moe_megatron", "run_async"

pytestmark = pytest.mark.slow
pytest.importorskip("verl")


def run(script: str, cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script from another directory, as after an installation, with this interpreter's programs."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        ["bash", str(SCRIPTS / f"{script}.sh"), *arguments],
        cwd=cwd,
        env={**inherited, "PATH": path, "RAY_TMPDIR": str(cwd), "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


Composed = Callable[..., DictConfig]


@pytest.fixture
def composed(tmp_path: Path) -> Composed:
    """Return the configuration of a script, composed by the installed verl, after verl's own validation."""

    def compose(script: str, *arguments: str, **environment: str) -> DictConfig:
        done = run(script, tmp_path, *arguments, "--cfg", "job", **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        config = OmegaConf.create(done.stdout)
        assert isinstance(config, DictConfig)
        validate(config)
        return config

    return compose


def validate(config: DictConfig) -> None:
    """Run verl's own checks of sizes and of the values that its dataclasses accept."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, need_reference_policy(config), need_critic(config))


def passes_the_checks(script: str, cwd: Path, *arguments: str) -> str:
    done = run(script, cwd, "--check", *arguments)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "offpolicy: all checks passed" in done.stdout
    assert not list(cwd.glob("**/session_*")), "Ray was started"
    return done.stdout


def select(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key, throw_on_missing=True)


@pytest.mark.parametrize("script", [DENSE, pytest.param(MOE, marks=pytest.mark.extended)])
def test_a_script_passes_the_checks_with_overrides_last(script: str, tmp_path: Path) -> None:
    printed = passes_the_checks(script, tmp_path, "correction.weight.upper=3.0")
    assert '"upper": 3.0' in printed
    assert '"gsm"' in printed


@pytest.mark.extended
@pytest.mark.verl(">=0.9")
def test_the_asynchronous_script_passes_the_checks(tmp_path: Path) -> None:
    assert '"delta": 0.2' in passes_the_checks(ASYNC, tmp_path, "correction.masks.opsm.delta=0.2")


@pytest.mark.verl("<0.9")
def test_the_asynchronous_script_says_that_the_release_has_no_such_trainer(tmp_path: Path) -> None:
    done = run(ASYNC, tmp_path, "--check")
    assert done.returncode == 1
    assert "has no trainer.v1.separate_async, which came with 0.9" in done.stderr
    assert "Fix: install verl 0.9.1, use fully_async_policy" in done.stderr


def test_the_dense_script(composed: Composed) -> None:
    config = composed(
        DENSE,
        "correction=[tis_sequence,outlier]",
        MODEL_PATH="/models/my model",
        TRAIN_FILE="/data/a b.parquet",
        NNODES="2",
        SP="4",
    )
    assert select(config, "actor_rollout_ref.model.path") == "/models/my model"
    assert select(config, "data.train_files") == "/data/a b.parquet"
    assert (select(config, "trainer.nnodes"), select(config, "trainer.n_gpus_per_node")) == (2, 8)
    assert select(config, "actor_rollout_ref.actor.ulysses_sequence_parallel_size") == 4
    assert select(config, "actor_rollout_ref.actor.strategy") == "fsdp2"
    assert select(config, "actor_rollout_ref.actor.fsdp_config.strategy") == "fsdp2"
    assert select(config, "actor_rollout_ref.rollout.calculate_log_probs") is True
    assert set(select(config, "correction.masks")) == {"outlier"}, "chosen by argument instead of the script's own"
    assert select(config, "correction.weight.level") == "sequence"


@pytest.mark.extended
def test_the_script_with_a_teacher(composed: Composed, tmp_path: Path) -> None:
    config = composed("run_opd", "opd.coef=0.5", TEACHER_URL="http://teacher:8100", OPD="loss")
    assert (config.opd.mode, config.opd.coef, config.opd.teacher.url) == ("loss", 0.5, "http://teacher:8100")
    refused = run("run_opd", tmp_path)
    assert refused.returncode == 2
    assert "TEACHER_URL is not set" in refused.stderr


@pytest.mark.extended
def test_the_script_for_a_mixture_of_experts(composed: Composed) -> None:
    config = composed(MOE, CORRECTION="tis_sequence")
    megatron = select(config, "actor_rollout_ref.actor.megatron")
    assert select(config, "actor_rollout_ref.actor.strategy") == "megatron"
    sizes = [megatron[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "expert_model")]
    assert sizes == [4, 2, 8]
    assert select(config, router_replay_mode()) == "R3"
    assert select(config, "actor_rollout_ref.rollout.enable_rollout_routing_replay") is True
    assert select(config, "correction.weight.level") == "sequence"


def router_replay_mode() -> str:
    """Read the key where the installed release's worker reads it; the legacy actor and the engine use
    different places.
    """
    import verl

    legacy = (Path(verl.__file__).parent / "workers" / "actor" / "megatron_actor.py").is_file()
    return "actor_rollout_ref.actor." + ("" if legacy else "megatron.") + "router_replay.mode"


@pytest.mark.verl("<0.8")
def test_the_engine_of_a_release_with_both_workers_gets_its_own_key(composed: Composed) -> None:
    config = composed(MOE, "trainer.use_legacy_worker_impl=disable", ROUTER_REPLAY="R2")
    assert select(config, "actor_rollout_ref.actor.megatron.router_replay.mode") == "R2"
    assert select(config, "actor_rollout_ref.rollout.enable_rollout_routing_replay") is False
