"""verl's replay buffer with more frequent polling, for `trainer.v1.sampler.custom_sampler`."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickReplayBuffer(ReplayBuffer):
    """Replay buffer that polls every 0.1 s; verl's buffer polls every 2 s, which is longer than this model's step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"poll_interval": 0.1, **kwargs})
