"""OpenRLHF's own policy loss and arguments."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.conformance import Loss, Options, Rows, compare, install, load, our_loss

pytestmark = pytest.mark.extended

IS, LOSS = "algo.advantage.is_correction_", "actor.policy_loss_type"
GRID: dict[str, list[Any]] = {
    f"{IS}level": ["off", "token", "seq"],
    f"{IS}mode": ["mask", "clip"],
    f"{IS}gating": ["ratio", "binary_kl", "tv"],
    f"{IS}threshold": [[0.5, 5.0], [0.8, 1.2], [0.0, 1.1], [0.0, 0.05], [0.0, 0.003]],
    LOSS: ["ppo", "gspo"],
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return install("openrlhf")


@pytest.fixture(scope="module")
def policy_loss(folder: Path) -> Any:
    """Load OpenRLHF's module of losses; the utilities next to it import deepspeed, which the loss does not use."""
    return load(folder, "openrlhf.models.loss", "openrlhf", "openrlhf.models", absent={"deepspeed"}).PolicyLoss


def theirs(policy_loss: Any, options: Options, rows: Rows) -> Loss:
    values = {name.rpartition(".")[2]: value for name, value in options.items()}
    loss = policy_loss(**values)

    def compute(pi: Tensor) -> Tensor:
        return loss(pi, rows.old, rows.advantages, rows.mask.double(), rows.mu)[0]

    return compute


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    if options.get(LOSS) == "gspo":
        return our_loss(spec, rows, mode="gspo", aggregation="seq-mean-token-mean", clip_ratio=0.2)
    return our_loss(spec, rows)


def test_policy_loss(policy_loss: Any) -> None:
    compare("openrlhf", GRID, functools.partial(theirs, policy_loss), ours, draws=600)
