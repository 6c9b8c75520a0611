"""How statistics are taken: they decide nothing, read no padding, keep their digits, and wait for no device."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.support.corrections import values
from tests.support.telemetry_cases import CORRECTIONS, NAN, Batch, random_batch, stages


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


def test_padding_and_tool_tokens_are_not_read() -> None:
    batch = random_batch(2)
    off = ~batch.mask
    spoiled = replace(
        batch,
        mu=batch.mu.masked_fill(off, -math.inf),
        old=batch.old.masked_fill(off, NAN),
        pi=batch.pi.masked_fill(off, 1e30),
        advantages=batch.advantages.masked_fill(off, NAN),
        segments=batch.segments.masked_fill(off, -1),
        versions=batch.versions.masked_fill(off, -1),
    )
    for correction in CORRECTIONS.values():
        clean, dirty = (values(stages(correction, some)[1]) for some in (batch, spoiled))
        assert dirty == pytest.approx(clean, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_measured_in_full(dtype: torch.dtype) -> None:
    batch = random_batch(4, dtype=dtype)
    wide = replace(batch, **{name: getattr(batch, name).double() for name in ("mu", "old", "pi")})
    short, full = (values(stages(CORRECTIONS["token"], some)[1]) for some in (batch, wide))
    assert short == pytest.approx(full, rel=1e-5, abs=1e-9, nan_ok=True)


def test_autocast_takes_no_digits() -> None:
    """The loss runs under it; a matrix product in bfloat16 would count to 256."""
    batch = random_batch(6)
    plain = values(stages(CORRECTIONS["token"], batch)[1])
    with torch.autocast("cpu", torch.bfloat16):
        cast = values(stages(CORRECTIONS["token"], batch)[1])
    assert cast == pytest.approx(plain, rel=0, abs=0, nan_ok=True)


def test_parts_are_detached_float64() -> None:
    batch = random_batch(8)
    leaves = replace(batch, **{name: getattr(batch, name).clone().requires_grad_() for name in ("mu", "old", "pi")})
    for correction in CORRECTIONS.values():
        for name, statistic in stages(correction, leaves)[1].statistics.items():
            for part in statistic.parts:
                assert isinstance(part, Tensor), name
                assert (part.dtype, part.shape, part.requires_grad) == (torch.float64, (), False), name


@pytest.mark.parametrize("name", ["none", "token", "full"])
def test_nothing_waits_for_the_device(name: str) -> None:
    """On the meta device, where there are no values: whatever reads one, or mixes in a tensor of the CPU, fails."""
    batch = random_batch(9)
    there = Batch(*(getattr(batch, field.name).to("meta") for field in fields(batch)))
    statistics = stages(CORRECTIONS[name], there)[1].statistics
    parts = {part.device.type for one in statistics.values() for part in one.parts if isinstance(part, Tensor)}
    assert parts == {"meta"}
