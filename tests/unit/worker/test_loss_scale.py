"""The factor that verl's engines expect, and losses that draw random numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy import smoke
from recipe.offpolicy.worker.loss import expected_scale
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig


class Engine:
    """The attributes of verl's engines."""

    def __init__(self, **has: Any) -> None:
        self.engine_config = SimpleNamespace()
        self.module = [SimpleNamespace(config=SimpleNamespace(grad_scale_func=None))]
        vars(self).update(has)

    def forward_backward_batch(self, **told: Any) -> Any:
        data = TensorDict({"rows": torch.zeros(2)}, batch_size=2)
        tu.assign_non_tensor(data, **told)
        found = expected_scale(torch.tensor(1.0, requires_grad=True), data)
        return None if found is None else float(found)


def test_fsdp_begins_with_one_or_with_the_scale_of_fp16() -> None:
    assert Engine(scaler=None).forward_backward_batch() == 1.0
    assert Engine(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12)).forward_backward_batch() == 4096.0


def test_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    doubled = [SimpleNamespace(config=SimpleNamespace(grad_scale_func=lambda loss: torch.tensor([1024.0]) * loss))]
    dynamic = SimpleNamespace(dynamic_context_parallel=True)
    assert Engine().forward_backward_batch(num_micro_batch=4) == 2.0
    assert Engine(module=doubled).forward_backward_batch(num_micro_batch=4) == 2048.0
    # Gradients are divided by the routed tokens of all ranks.
    assert Engine().forward_backward_batch(num_micro_batch=4, routed_num_tokens=900, dp_size=3) == 300.0
    assert Engine(engine_config=dynamic).forward_backward_batch(num_micro_batch=4) is None


@pytest.mark.parametrize("expected", [2.0, torch.tensor(2.0), torch.tensor([2.0])])
def test_what_arrives_is_a_multiple_of_it(expected: Any) -> None:
    from recipe.offpolicy.worker.metrics import Ledger, Packet

    packet, ledger = Packet(1), Ledger()
    packet._ledger, ledger._packets[id(packet)] = ledger, packet
    loss = torch.tensor(1.0, requires_grad=True) * 1.0
    packet.watch(loss, expected)
    (loss * 3.0).backward()
    packet.settle()
    assert packet.scales == {1.5: 1}


def test_clip_cov_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens may be clipped, and one of them is, drawn at random; the generator's state is as without a proof."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=4,
        policy_loss=PolicyLossConfig(loss_mode="clip_cov", clip_cov_lb=-10.0, clip_cov_ub=10.0),
    )
    monkeypatch.setattr(smoke, "FSDPActorConfig", lambda **given: config)
    # The formulas that smoke judges the parameters by clip nothing.
    monkeypatch.setattr(smoke, "_judge_parameters", lambda model, tokens: 0.0)
    torch.manual_seed(1)
    found = smoke.run_update()
    assert found["proved"] == 1.0
    assert found["gradient_error"] < 1e-5
    after = torch.get_rng_state()
    monkeypatch.setattr(smoke.OffPolicyLoss, "proves", lambda self, batch: False)
    torch.manual_seed(1)
    with pytest.raises(smoke.LivenessError):
        smoke.run_update()
    assert torch.equal(torch.get_rng_state(), after)
