"""What the injected faults do to weights, log-probs and the engine's prefix cache."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.support.paths import ROOT

SCRIPTS = ROOT / "scripts" / "evidence"
sys.path.insert(0, str(SCRIPTS))

from injected_faults.cases import CASES, DATA, FaultCase  # noqa: E402

from recipe.offpolicy.analysis.attribution.recorded_tokens import compute_k3  # noqa: E402
from recipe.offpolicy.recording import Recording  # noqa: E402


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("OFFPOLICY_INJECT", raising=False)
    return importlib.import_module("injected_faults.inject")


def test_rounding_keeps_as_many_bits_as_it_says(inject: ModuleType) -> None:
    """Three bits next to the leading one: between 1 and 2 the steps are eighths, between 2 and 4 quarters."""
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


def test_ages_of_what_the_prefix_cache_gave(inject: ModuleType) -> None:
    """Blocks of two tokens; a prefix is as old as the request that computed it, whichever ended first."""
    ages = inject.CacheAges()
    assert ages.synchronised() == {"synchronisation": 0, "requests": 0, "tokens": 0, "cached_by_age": {}}
    ages.served([1, 2, 3], 2)  # ends before the request that computed its first block
    ages.served([1, 2, 3], 0)
    assert ages.synchronised() == {"synchronisation": 1, "requests": 2, "tokens": 6, "cached_by_age": {"0": 2}}
    ages.served([1, 2, 3, 4, 5], 2)  # its second block is new
    ages.served([1, 2, 9], 2)
    ages.served([8, 8, 9], 0)
    assert ages.synchronised()["cached_by_age"] == {"1": 4}
    ages.served([1, 2, 3, 4, 6], 4)  # as old as the last of its blocks
    ages.served([1, 2, 3], 2)
    ages.served([8, 8, 9], 0)  # cleared meanwhile, and computed again
    ages.served([8, 8, 9], 2)
    assert ages.synchronised()["cached_by_age"] == {"0": 2, "1": 4, "2": 2}


def cached_runs() -> list[FaultCase]:
    return [case for case in CASES if case.environment.get("OFFPOLICY_INJECT", "").startswith("cache:")]


@pytest.mark.parametrize("case", cached_runs(), ids=lambda case: f"{case.name}-{case.seed}")
def test_what_the_cache_gave_in_the_recorded_runs_was_as_old_as_injected(case: FaultCase) -> None:
    """Counted by the engine itself: tokens by age at each step, and the KL of the steps that had old ones."""
    folder = DATA / case.part / f"{case.name}-{case.seed}"
    served = json.loads((folder / "run.json").read_text())["injected"]["served"]
    ages = [{int(age) for age in line["cached_by_age"]} for line in served]
    period = int(case.environment["OFFPOLICY_INJECT"].partition(":")[2])
    assert [line["synchronisation"] for line in served] == list(range(1, case.steps + 1))
    assert all(line["requests"] == 128 for line in served)
    # Step 1 comes after the first synchronisation, which clears the cache, and so do steps a period later.
    assert [max(age) for age in ages] == [(step - 1) % period for step in range(1, case.steps + 1)]
    rows = Recording(folder).rows()
    loss = compute_k3((rows.old_log_prob - rows.rollout_log_prob).astype(np.float64))
    kl = [float(loss[(rows.step == step)[rows.row_of_token]].mean()) for step in range(1, case.steps + 1)]
    stale = [max(age) > 0 for age in ages]
    assert any(stale) == bool(case.causes)
    assert max(value for value, old in zip(kl, stale, strict=True) if not old) < 1e-3
    assert all(value > 5e-3 for value, old in zip(kl, stale, strict=True) if old)
