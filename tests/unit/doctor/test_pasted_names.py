"""Fixes of keys that nothing reads: pasted behind the launch, they compose and leave nothing to report."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.checks.replay import check_router_replay
from recipe.offpolicy.preflight.checks.verl_correction import check_former_names
from tests.support.applications import composed
from tests.support.corrections import GSM, TIS
from tests.support.mended import with_overrides
from verl_patches.execution_path import LivePath

ACTOR = "actor_rollout_ref.actor"
MEGATRON = LivePath("0.9.1", "v1", "engine", "megatron")
FSDP = LivePath("0.9.1", "v1", "engine", "fsdp2")
OF_VERL = {"_target_": "verl.workers.config.RouterReplayConfig", "mode": "R2"}


@pytest.mark.parametrize(
    ("actor", "path", "overrides"),
    [
        # What a path reads gets the mode; without such a key the user chooses.
        ({"router_replay": {"mode": "R2"}}, FSDP, []),
        (
            {"router_replay": {"mode": "R2"}},
            MEGATRON,
            [f"~{ACTOR}.router_replay", f"++{ACTOR}.megatron.router_replay.mode=R2"],
        ),
        ({"router_replay": OF_VERL | {"record_file": "f"}}, FSDP, []),
    ],
)
def test_a_router_replay_that_nothing_reads(actor: dict[str, Any], path: LivePath, overrides: list[str]) -> None:
    config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": {}}, "algorithm": {}})
    found = list(check_router_replay(composed(config, CorrectionSpec(), path)))
    proposed = list(dict.fromkeys(each for problem in found for each in problem.overrides))
    assert proposed == overrides
    if overrides:
        assert list(check_router_replay(composed(with_overrides(config, proposed), CorrectionSpec(), path))) == []


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ({"rollout_is": True}, ["~algorithm.rollout_is", "algorithm.rollout_correction.rollout_is=token"]),
        ({"rollout_is": False}, ["~algorithm.rollout_is"]),
        (
            {"rollout_is": True, "rollout_is_level": "sequence"},  # the last override counts: sequence
            [
                "~algorithm.rollout_is",
                "algorithm.rollout_correction.rollout_is=token",
                "~algorithm.rollout_is_level",
                "algorithm.rollout_correction.rollout_is=sequence",
            ],
        ),
    ],
)
def test_former_names_move_with_their_values(algorithm: dict[str, Any], overrides: list[str]) -> None:
    config = OmegaConf.create({"algorithm": {"rollout_correction": {"rollout_is": None}} | algorithm})
    found = list(check_former_names(composed(config, CorrectionSpec())))
    assert [each for problem in found for each in problem.overrides] == overrides
    mended = with_overrides(config, overrides)
    assert list(check_former_names(composed(mended, CorrectionSpec()))) == []


FORMER = {f"{ACTOR}.tis_imp_ratio_cap": (3.0, 3.0), "algorithm.rollout_is_threshold": (5.0, 5.0)}


@pytest.mark.parametrize("key", [*FORMER, "algorithm.rollout_is"])
def test_a_former_name_next_to_our_weight_becomes_ours(key: str) -> None:
    """verl's key next to ours would correct twice, so that its successor is never proposed."""
    value, cap = FORMER.get(key, (True, 2.0))
    ours: Any = {"weight": dict(TIS), "masks": {}}
    config = OmegaConf.create({"correction": ours, "algorithm": {}, "actor_rollout_ref": {"actor": {}}})
    OmegaConf.update(config, key, value, force_add=True)
    (problem,) = check_former_names(composed(config, CorrectionSpec.from_mapping(ours)))
    mended = with_overrides(config, problem.overrides)
    assert mended.correction.weight.upper == cap
    assert list(check_former_names(composed(mended, CorrectionSpec.from_mapping(ours)))) == []
    gsm = CorrectionSpec.from_mapping({"masks": {"gsm": GSM}})
    assert [each.overrides for each in check_former_names(composed(config, gsm))] == [()]
