"""The add-ons of a configuration, and their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

SUPPORT = {"correction.support": "engine", "actor_rollout_ref.rollout.top_p": 0.9}
R3 = {"actor_rollout_ref.actor.fsdp_config.router_replay.mode": "R3"}
MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron"}
WATCHED = {"actor_rollout_ref.actor.megatron.router_replay.mode": "R2"}
ETA = {"offpolicy.staleness.eta": 0}
SNAPSHOTS = {"offpolicy.late_weights.snapshots": 2}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"offpolicy.delivery.sums": 1}, ["WeightDelivery"]),
        (MEGATRON | WATCHED, ["MegatronReplay"]),
        (SUPPORT | R3 | SNAPSHOTS | ETA, ["SupportReplay", "RoutingReplay", "WeightSnapshots", "StalenessLimit"]),
    ],
)
def test_what_is_off_is_left_out(changes: dict[str, Any], names: list[str]) -> None:
    from recipe.offpolicy.trainer.corrected_run import choose_v0, choose_v1

    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "rollout": {}},
            "correction": {"support": None, "support_unknown": "mask", "support_size": 8},
            "data": {"train_batch_size": 4},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "offpolicy": {
                "delivery": {"sums": None, "probe": None},
                "replay": {"oldest": None},
                "staleness": {"eta": None},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    run: Any = SimpleNamespace(config=config)
    assert [type(each).__name__ for each in choose_v1(run)] == names
    config.trainer.use_v1 = False
    assert [type(each).__name__ for each in choose_v0(run)] == [
        name for name in names if name in ("SupportReplay", "WeightDelivery")
    ]
