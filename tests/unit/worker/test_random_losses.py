"""A loss of verl that draws random numbers is proved with the numbers that it drew."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy import smoke
from verl.workers.config import FSDPActorConfig, PolicyLossConfig


def test_clip_cov_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens may be clipped, and one of them is, drawn at random; the generator is left as without a proof."""
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
