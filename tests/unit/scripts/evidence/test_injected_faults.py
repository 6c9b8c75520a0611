"""The effect of the injected faults on weights, log-probs and the engine's prefix cache."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from tests.support.paths import ROOT

SCRIPTS = ROOT / "scripts" / "evidence"
sys.path.insert(0, str(SCRIPTS))


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("OFFPOLICY_INJECT", raising=False)
    return importlib.import_module("injected_faults.inject")


def test_rounding_keeps_as_many_bits_as_it_says(inject: ModuleType) -> None:
    """Three bits after the leading one: steps are eighths between 1 and 2, and quarters between 2 and 4."""
    weight = torch.tensor([1.0, 1.06, 1.07, 1.9, 2.1, 2.2, -1.07, 0.0, 1e-8])
    assert inject.rounded(weight, 3)[:8].tolist() == [1.0, 1.0, 1.125, 1.875, 2.0, 2.25, -1.125, 0.0]
    assert inject.rounded(weight, 3)[8] == pytest.approx(1e-8, rel=1 / 16)
    assert torch.equal(inject.rounded(weight, 23), weight)
    assert inject.rounded(weight.bfloat16(), 3).dtype == torch.bfloat16


def test_late_weights_are_those_of_so_many_calls_before(inject: ModuleType) -> None:
    def send(late: object, count: int) -> list[float]:
        return [dict(late([("w", torch.tensor(float(number)))]))["w"].item() for number in range(count)]  # type: ignore[operator]

    assert send(inject.LateWeights(8), 12) == [0.0] * 9 + [1.0, 2.0, 3.0]
    assert send(inject.LateWeights(0), 3) == [0.0, 1.0, 2.0]
