"""Checks that read more than keys: a model's files, verl's own configuration and code, and extensions; and all checks
together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.dialects.verl import VERL_DEFAULTS
from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.extensions.add_on import KEY as EXTENSIONS
from recipe.offpolicy.preflight.checks.readable import (
    find_missing_actor,
)
from recipe.offpolicy.preflight.checks.rollout import check_bucket, check_routing_replay
from recipe.offpolicy.preflight.checks.staleness import REPLACED, check_extensions
from recipe.offpolicy.preflight.checks.verl_correction import find_meant
from recipe.offpolicy.preflight.composed import ASYNC_MODES, Composed
from recipe.offpolicy.preflight.examination import run_checks
from recipe.offpolicy.preflight.own_keys import list_verls_names
from tests.support.applications import changed, composed
from verl_patches.execution_path import LivePath
from verl_patches.releases import V1_MODES

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MU, BUCKET = f"{ROLLOUT}.calculate_log_probs", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")


def problems(config: DictConfig, changes: dict[str, Any]) -> list[str]:
    """The problems of a configuration, as the user reads them."""
    try:
        run_checks(Composed(changed(config, changes)))
    except CheckError as error:
        return str(error).split("\n")
    return []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer.v1.trainer_mode": "colocate_async"},
        {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    ],
)
def test_a_healthy_launch_passes_all_checks(changes: dict[str, Any], base: DictConfig) -> None:
    assert problems(base, changes) == []


def test_all_problems_are_reported_at_once(base: DictConfig) -> None:
    """An error of verl hides none of our problems, and vice versa."""
    changes = {MU: False, f"{ROLLOUT}.top_p": 0.9, "distillation.enabled": True, f"{ACTOR}.loss_agg_mode": "mean"}
    found = problems(base, changes)
    assert len(found) == 4
    for key, value in changes.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        assert any(line.startswith(f"{key}={shown}: ") for line in found)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"trainer": {}}, True),  # verl's SFT
        ({"actor_rollout_ref": {"rollout": {}}}, True),  # verl's generation
        ({"actor_rollout_ref": {"actor": None}}, False),  # a null section
        ({"actor_rollout_ref": {"actor": {}}}, False),
    ],
)
def test_a_program_without_an_actor_is_named(config: dict[str, Any], missing: bool) -> None:
    assert bool(list(find_missing_actor(OmegaConf.create(config)))) is missing


def test_verls_defaults_count_as_not_set(base: DictConfig) -> None:
    assert Composed(base).changed == {}
    assert dict(base.algorithm.rollout_correction) == VERL_DEFAULTS
    found = {name for name in list_verls_names() - set(VERL_DEFAULTS) if find_meant(["x", name])}
    assert found == {"rollout_correction", "loss_mode"}


@pytest.mark.verl("==0.9.1")
def test_values_that_mean_unset_are_verls_own() -> None:
    import verl

    shipped = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "ppo_trainer.yaml")
    assert set(ASYNC_MODES) == set(V1_MODES) - {"sync"}
    for name, usual in REPLACED.items():
        for key in [name] if "." in name else [f"trainer.v1.{mode}.{name}" for mode in ASYNC_MODES]:
            assert OmegaConf.select(shipped, key) == usual


# A model's files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "release", "dtype", "bucket", "proposed"),
    [
        ("cpu", "0.9.1", "fp32", 107, 109),  # 49 152 x 576 elements of 4 bytes are 108 MiB
        ("cpu", "0.9.1", "fp32", 108, None),
        ("cuda", "0.9.1", "fp32", 16, None),  # it goes by a handle of its own
        ("cuda", "0.7.1", "fp32", 16, 109),
    ],
)
def test_a_bucket_smaller_than_the_largest_tensor_is_refused(
    device: str,
    release: str,
    dtype: str,
    bucket: int,
    proposed: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    (tmp_path / "config.json").write_text('{"vocab_size": 49152, "hidden_size": 576}')
    config = OmegaConf.create({"trainer": {"device": device}, "actor_rollout_ref": {"actor": {"strategy": "fsdp"}}})
    OmegaConf.update(config, f"{ACTOR}.fsdp_config.model_dtype", dtype, force_add=True)
    OmegaConf.update(config, BUCKET, bucket, force_add=True)
    for path, expected in ((tmp_path, proposed), (tmp_path / "nowhere", None)):
        OmegaConf.update(config, f"{MODEL}.path", str(path), force_add=True)
        found = check_bucket(composed(config, path=LivePath(release, "v1", "engine", "fsdp")))
        assert [problem.overrides for problem in found] == ([(f"{BUCKET}={expected}",)] if expected else [])


@pytest.mark.parametrize(("values", "refused"), [({"num_experts": 8}, False), ({"hidden_size": 8}, True)], ids=str)
def test_replay_for_a_model_without_experts_is_refused(
    tmp_path: Path, values: dict[str, int], refused: bool, base: DictConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    mode = f"{ACTOR}.fsdp_config.router_replay.mode"
    run = composed(
        changed(base, {mode: "R3", f"{MODEL}.path": str(tmp_path)}), path=LivePath("0.9.1", "v1", "engine", "fsdp2")
    )
    found = [each for each in check_routing_replay(run) if each.key == mode]
    assert [(each.value, each.verdict) for each in found] == [("R3", "ERROR")] * refused
    assert run.router_replay == f"{mode}=R3"


# Extensions -----------------------------------------------------------------------------------------------------


def extended(*, mu: bool = True, **settings: Any) -> Composed:
    config = OmegaConf.create({"one": {"bonus": 1.0, **settings}, "two": {"bonus": 1.0}})
    for key, value in {EXTENSIONS: dict.fromkeys(("one", "two"), "tests.support.nudge:Nudge"), MU: mu}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return Composed(config, CorrectionSpec())


def test_extensions_that_act_on_the_loss_need_mu() -> None:
    assert list(check_extensions(extended())) == []
    (problem,) = check_extensions(extended(mu=False))
    assert (problem.key, problem.parts) == (MU, ("one", "two"))


# The engine of rows, and what checks share ----------------------------------------------------------------------
