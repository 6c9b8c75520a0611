"""How statistics are taken: they decide nothing, read no padding, keep their digits, and wait for no device."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tests.support.corrections import values
from tests.support.telemetry_cases import CORRECTIONS, Batch, random_batch, stages


@pytest.mark.parametrize("name", CORRECTIONS)
def test_measuring_decides_nothing(name: str) -> None:
    """What is left out are keys; weight and keep are those of a full measurement."""
    batch = random_batch(5)
    stepped = {
        measure: stages(CORRECTIONS[name], batch, measure=measure) for measure in ("all", "decisions", "nothing")
    }
    everything = values(stepped["all"][1])
    some = values(stepped["decisions"][1])
    assert stepped["nothing"][0].statistics == stepped["nothing"][1].statistics == {}
    assert some == pytest.approx({key: everything[key] for key in some}, nan_ok=True)
    assert {"keep/token_share", "turn/first/keep_token_share", "weight/ess"} <= set(some) < set(everything)
    for _, step in stepped.values():
        assert torch.equal(step.weight, stepped["all"][1].weight)
        assert torch.equal(step.keep, stepped["all"][1].keep)


def test_autocast_takes_no_digits() -> None:
    """The loss runs under it; a matrix product in bfloat16 would count to 256."""
    batch = random_batch(6)
    plain = values(stages(CORRECTIONS["token"], batch)[1])
    with torch.autocast("cpu", torch.bfloat16):
        cast = values(stages(CORRECTIONS["token"], batch)[1])
    assert cast == pytest.approx(plain, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", ["none", "token", "full"])
def test_nothing_waits_for_the_device(name: str) -> None:
    """On the meta device, where there are no values: whatever reads one, or mixes in a tensor of the CPU, fails."""
    batch = random_batch(9)
    there = Batch(*(getattr(batch, field.name).to("meta") for field in fields(batch)))
    statistics = stages(CORRECTIONS[name], there)[1].statistics
    parts = {part.device.type for one in statistics.values() for part in one.parts if isinstance(part, Tensor)}
    assert parts == {"meta"}
