"""What the injected faults do to weights, log-probs and the engine's prefix cache."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.support.paths import ROOT

SCRIPTS = ROOT / "scripts" / "evidence"
sys.path.insert(0, str(SCRIPTS))

from injected_faults import make  # noqa: E402
from injected_faults.cases import CASES, FaultCase  # noqa: E402
from injected_faults.evaluate import DATA  # noqa: E402

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


def test_matrices_are_rounded_by_name(inject: ModuleType) -> None:
    ones = torch.full((2, 2), 1.3)
    weights = [("layers.0.mlp.gate.weight", ones), ("layers.0.mlp.down.weight", ones), ("mlp.gate.weight", ones[0])]
    changed = [float(weight.flatten()[0]) for _, weight in inject.round_matrices(weights, 0, "mlp.gate.weight")]
    assert changed == pytest.approx([1.0, 1.3, 1.3])
    changed = [float(weight.flatten()[0]) for _, weight in inject.round_matrices(weights, 0)]
    assert changed == pytest.approx([1.0, 1.0, 1.3])


def test_late_weights_are_those_of_so_many_calls_before(inject: ModuleType) -> None:
    def send(late: object, count: int) -> list[float]:
        return [dict(late([("w", torch.tensor(float(number)))]))["w"].item() for number in range(count)]  # type: ignore[operator]

    assert send(inject.LateWeights(8), 12) == [0.0] * 9 + [1.0, 2.0, 3.0]
    assert send(inject.LateWeights(0), 3) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("by", "moved"), [(0, [1, 2, 3]), (1, [3, 1, 2]), (-1, [2, 3, 1]), (4, [3, 1, 2])])
def test_log_probs_move_by_tokens(inject: ModuleType, by: int, moved: list[int]) -> None:
    assert inject.moved([1, 2, 3], by) == moved
    assert inject.moved([], by) == []


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


@dataclass
class Output:
    """What vLLM says of a request."""

    prompt_token_ids: list[int]
    num_cached_tokens: int | None


class Engine:
    """An engine of vLLM, as far as the prefix cache goes."""

    def __init__(self) -> None:
        self.cached: int | None = None

    async def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        self.cached = None
        return True

    async def generate(self, prompt: str) -> AsyncIterator[Output]:
        yield Output([1, 2, 3], self.cached)
        self.cached = 2


def test_one_of_several_synchronisations_clears_the_cache(
    inject: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of every three; requests and what they took from the cache are noted at each one."""
    module = ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", module)
    monkeypatch.setattr(inject, "STRENGTH", "3")
    monkeypatch.setenv("OFFPOLICY_INJECT_CACHE", str(tmp_path / "served"))
    for name in ("reset_prefix_cache", "generate"):
        monkeypatch.setattr(Engine, name, vars(Engine)[name])  # put back afterwards
    inject._cache()

    async def synchronise(times: int) -> list[int | None]:
        engine, cached = Engine(), []
        for _ in range(times):
            assert await engine.reset_prefix_cache(reset_connector=True)
            cached += [output.num_cached_tokens async for output in engine.generate("")]
        return cached

    assert asyncio.run(synchronise(7)) == [None, 2, 2, None, 2, 2, None]
    lines = [json.loads(line) for line in (tmp_path / "served").read_text().splitlines()]
    assert [line["synchronisation"] for line in lines] == list(range(7))
    assert [line["requests"] for line in lines] == [0, 1, 1, 1, 1, 1, 1]
    assert [line["cached_by_age"] for line in lines] == [{}, {}, {"1": 2}, {"2": 2}, {}, {"1": 2}, {"2": 2}]


def test_questions_that_come_again_fill_a_block() -> None:
    """Before the question stands its word, over and over, up to one length together with the word itself."""
    entries = [{"question": f"Spell: {word}", "metadata": {"word": word}} for word in ("sun", "sister", "a", "moon")]
    assert make.of_one_length(entries[0])["question"] == "sunsunsunsSpell: sun"
    assert make.of_one_length(entries[1])["question"] == "sistersSpell: sister"
    assert entries[0]["question"] == "Spell: sun"
    assert len(make.questions("again-3", entries)) == 3
    mixed = [entry["metadata"]["word"] for entry in make.questions("again-1-new-3", entries)]
    assert mixed == ["sun", "sun", "sun", "sister", "a", "moon"]


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


def test_an_unknown_fault_is_refused(inject: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFPOLICY_INJECT", "nonsense:1")
    with pytest.raises(ValueError, match="OFFPOLICY_INJECT=nonsense: unknown, one of temperature, shift"):
        importlib.reload(sys.modules["injected_faults.inject"])
    monkeypatch.delenv("OFFPOLICY_INJECT")
    importlib.reload(sys.modules["injected_faults.inject"])
