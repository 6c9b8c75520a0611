"""A reward that is not finite names its sequence, wherever rewards enter an extension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.opd.distillation import OnPolicyDistillation
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.proof.rewards import RewardError
from tests.support.shaped import make_batch, shape


def in_training(extension: Any) -> Callable[[float], object]:
    def run(reward: float) -> object:
        extension.begin(OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}}))
        return shape(make_batch([("a", 2, 1.0), ("a", 3, reward), ("a", 2, 0.0), ("a", 2, 1.0)]), extension)

    return run


def in_validation(reward: float) -> object:
    extension = PassAtK("pass_at_k", {"objective": "none"})
    return extension.validation_metrics(["s"] * 4, ["a"] * 4, {"reward": [1.0, reward, 0.0, 1.0]})


def in_distillation(reward: float) -> object:
    extension = OnPolicyDistillation("opd", {"mode": "advantage", "teacher": {"url": "http://127.0.0.1:1"}})
    view = make_batch([("a", 2, 1.0), ("a", 3, reward)])
    return extension._find_eligible(view, view.rows("response_mask")["response_mask"].bool())


PATHS = {
    "pass@k": in_training(PassAtK("pass_at_k", {"objective": "loo", "k": 2})),
    "lengths": in_training(LengthPenalty("length_penalty", {"kind": "none"})),
    "validation": in_validation,
    "distillation": in_distillation,
}


@pytest.mark.parametrize("reward", [math.nan, -math.inf])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_names_the_sequence(path: str, reward: float) -> None:
    with pytest.raises(RewardError, match=rf"the reward of sequence 1 \(prompt a.*\) is {reward}\."):
        PATHS[path](reward)
