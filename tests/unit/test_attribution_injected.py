"""What the injected faults do to weights and log-probs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "evidence"


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("OFFPOLICY_INJECT", raising=False)
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("injected_faults.inject")


def test_rounding_keeps_as_many_bits_as_it_says(inject: ModuleType) -> None:
    """Three bits beside the leading one: between 1 and 2 the steps are eighths, between 2 and 4 quarters."""
    weight = torch.tensor([1.0, 1.06, 1.07, 1.9, 2.1, 2.2, -1.07, 0.0, 1e-8])
    assert inject.rounded(weight, 3)[:8].tolist() == [1.0, 1.0, 1.125, 1.875, 2.0, 2.25, -1.125, 0.0]
    assert inject.rounded(weight, 3)[8] == pytest.approx(1e-8, rel=1 / 16)
    assert torch.equal(inject.rounded(weight, 23), weight)
    assert inject.rounded(weight.bfloat16(), 3).dtype == torch.bfloat16


@pytest.mark.parametrize(("by", "moved"), [(0, [1, 2, 3]), (1, [3, 1, 2]), (-1, [2, 3, 1]), (4, [3, 1, 2])])
def test_log_probs_move_by_tokens(inject: ModuleType, by: int, moved: list[int]) -> None:
    assert inject.moved([1, 2, 3], by) == moved
    assert inject.moved([], by) == []


def test_an_unknown_fault_is_refused(inject: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFPOLICY_INJECT", "nonsense:1")
    with pytest.raises(ValueError, match="OFFPOLICY_INJECT=nonsense: unknown, one of temperature, shift"):
        importlib.reload(sys.modules["injected_faults.inject"])
    monkeypatch.delenv("OFFPOLICY_INJECT")
    importlib.reload(sys.modules["injected_faults.inject"])
