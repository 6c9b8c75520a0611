"""What a run with routing replay tells workers and logger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")


def add_on(mode: Any, **run: Any) -> Any:
    from recipe.offpolicy.replay.batch_routes import ReplaySettings
    from recipe.offpolicy.replay.routing_replay import RoutingReplay

    made: Any = SimpleNamespace(**run)
    return RoutingReplay(made, ReplaySettings(mode, None))


@pytest.mark.parametrize(
    ("step", "changes", "native"),
    [(1, {}, True), (3, {"every": 2}, True), (2, {"every": 2}, False), (1, {"without_replay": False}, False)],
)
def test_pi_old_without_replay_is_computed_before_that_with_it(
    step: int, changes: dict[str, Any], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a pass whose batch names no step to replay, in the steps that are recorded alone."""
    from recipe.offpolicy.recording.run import RecordSettings
    from recipe.offpolicy.recording.schema import WITHOUT_REPLAY
    from recipe.offpolicy.replay import routing_replay
    from recipe.offpolicy.replay.batch_routes import REPLAY_STEP

    passes: list[dict[str, Any]] = []
    put: dict[str, Any] = {}

    def read(batch: Any, *names: str) -> dict[str, Any]:
        # A prompt of two tokens and a response of two; log-probs stand at the token before.
        nested = {"log_probs": [[-9.0, -1.0, -2.0, -9.0]], "response_mask": [[1, 1]]}
        return {
            name: torch.nested.as_nested_tensor([torch.tensor(row) for row in nested[name]], layout=torch.jagged)
            for name in names
        }

    def put_columns(batch: Any, **columns: Any) -> Any:
        put.update(columns)
        return batch

    monkeypatch.setattr(routing_replay, "read_columns", read)
    monkeypatch.setattr(routing_replay, "put_columns", put_columns)
    recording = SimpleNamespace(settings=RecordSettings.at("there", **{"without_replay": True, **changes}))
    workers = SimpleNamespace(compute_log_prob=lambda batch: passes.append(dict(batch.extra_info)))
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 0.7}}})
    cost = SimpleNamespace(add_columns=lambda columns: None)
    made = add_on("R3", config=config, global_steps=step, recording=recording, workers=workers, cost=cost)
    batch = SimpleNamespace(extra_info=made.batch_flags())
    made.old_log_prob(lambda batch: batch, batch, {})
    assert batch.extra_info[REPLAY_STEP] == step
    assert len(passes) == native
    if native:
        assert passes == [{"calculate_entropy": False, "compute_loss": False, "temperature": 0.7}]
        (row,) = put[WITHOUT_REPLAY].unbind()
        assert row.tolist() == [-1.0, -2.0]
    else:
        assert not put
