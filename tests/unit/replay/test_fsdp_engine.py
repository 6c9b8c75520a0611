"""Replay around an engine of three methods; verl's own are in tests/integration/test_replaying_engine.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.support.mixtures import TOKENS, build_mixture, draw_tokens

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")


class Engine:
    """One micro-batch, packed, and a loss that may fail."""

    def __init__(self) -> None:
        self.module = build_mixture("Qwen3Moe")
        self.fails = False

    def eval_mode(self) -> Any:
        return nullcontext()

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        return {"input_ids": micro_batch["input_ids"].values()[None]}, {}

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        inputs, _ = self.prepare_model_inputs(micro_batch=micro_batch)
        logits = self.module(**inputs, use_cache=False).logits
        if self.fails:
            raise ArithmeticError
        return logits.sum(), {"model_output": {}, "metrics": {}}

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        _, output = self.forward_step(data, loss_function=loss_function, forward_only=forward_only)
        return output


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.utils.device

    monkeypatch.setattr(verl.utils.device, "get_device_id", lambda: "cpu")


def batch(**flags: Any) -> TensorDict:
    from verl.utils import tensordict_utils as tu

    ids = torch.nested.as_nested_tensor(list(draw_tokens()), layout=torch.jagged)
    data = TensorDict({"input_ids": ids}, batch_size=len(draw_tokens()))
    tu.assign_non_tensor(data, **flags)
    return data


def test_the_forward_of_pi_old_hands_out_its_routes() -> None:
    from recipe.offpolicy.replay.batch_routes import REPLAY_STEP, ROUTES
    from recipe.offpolicy.replay.fsdp_engine import install_in_engine

    engine = Engine()
    replaying = install_in_engine(engine, "R2")
    flags = {"enable_routing_replay": True, REPLAY_STEP: 3}
    output = engine.forward_backward_batch(batch(**flags), None, forward_only=True)
    routes = output["model_output"][ROUTES]
    assert routes.dtype == torch.int16
    assert routes.values().shape == (TOKENS, 3, 2)
    assert output["metrics"] == {}
    # Without verl's flag, or our step, nothing is recorded.
    for other in ({**flags, "enable_routing_replay": False}, {**flags, REPLAY_STEP: 0}):
        assert engine.forward_backward_batch(batch(**other), None, forward_only=True)["model_output"] == {}
    engine.fails = True
    with pytest.raises(ArithmeticError):
        engine.forward_backward_batch(batch(**flags), None, forward_only=True)
    assert not any(slot.armed for slot in replaying.model._slots.values())
