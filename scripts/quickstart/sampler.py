"""verl's replay buffer with a shorter poll, for `trainer.v1.sampler.custom_sampler`."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickReplayBuffer(ReplayBuffer):
    """Polls TransferQueue every 0.1 s.

    verl polls every 2 s and offers no key for it; a step of this model takes less than that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("poll_interval", 0.1)
        super().__init__(*args, **kwargs)
