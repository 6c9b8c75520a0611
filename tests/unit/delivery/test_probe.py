"""The probe of delivered weights, and its error rates."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.delivery.probe import (
    IN_A_ROW,
    KEPT_IN_A_ROW,
    Probe,
    ProbeTest,
    compare_changes,
)
from recipe.offpolicy.proof.verify import LivenessError
from tests.support.examples import each_nth_by_default

ROWS = [([number, 1, 2], [3, 4, 5, number % 7]) for number in range(16)]


class Model:
    """Log-probs of sequences, with one weight per token id."""

    def __init__(self) -> None:
        self.weight = torch.zeros(32, dtype=torch.float64)

    def score(self, ids: list[int]) -> list[float]:
        return (self.weight[ids[1:]] * torch.tensor(ids[:-1]).double() / 8).tolist()


class World:
    """A trainer, a server that answers at once, and a fault by which the server does not follow the trainer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recipe.offpolicy.delivery.probe.ray.wait", lambda asked, **kwargs: (asked, []))
        monkeypatch.setattr("recipe.offpolicy.delivery.probe.ray.get", lambda asked: asked)
        self.own, self.engine = Model(), Model()
        self.cached: int | None = 0
        self.aborts = False
        self.replica = SimpleNamespace(servers=[SimpleNamespace(generate=SimpleNamespace(remote=self.generate))])
        self.probe = Probe(256, "Go on without it.")
        self.at = 0
        self.generator = torch.Generator().manual_seed(0)

    def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        fields: dict[str, Any] = {"num_cached_tokens": self.cached}
        if self.aborts:
            return SimpleNamespace(token_ids=[], extra_fields={})
        if "prompt_logprobs" in sampling_params:
            fields["prompt_logprobs"] = [[value] for value in self.engine.score(prompt_ids)] + [[0.0]]
        return SimpleNamespace(token_ids=[1], extra_fields=fields)

    def step(self, delivered: bool = True, seen: float = math.nan) -> dict[str, float]:
        """One synchronisation, the next batch, and an update."""
        self.at += 1
        if delivered:
            self.engine.weight = self.own.weight.clone()
        self.probe.ask([self.replica])
        view = SimpleNamespace(
            token_ids=ROWS,
            uids=[str(number) for number in range(len(ROWS))],
            compute_log_probs=lambda rows: [self.own.score(prompt + response) for prompt, response in rows],
        )
        metrics = self.probe.hear(view, self.at, seen)
        self.own.weight += torch.randn(32, generator=self.generator, dtype=torch.float64)
        return metrics


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_an_engine_that_follows(world: World) -> None:
    metrics = [world.step() for _ in range(8)]
    assert metrics[0] == {}
    assert metrics[1] == {"probe_apart": 0.0}
    assert metrics[-1]["probe_slope"] == pytest.approx(1.0)


def test_an_engine_that_is_not_updated(world: World) -> None:
    world.step()
    world.step()
    for _ in range(IN_A_ROW - 1):
        world.step(delivered=False)
    with pytest.raises(LivenessError, match=r"do not follow.*change by 0 \+- .* in a row"):
        world.step(delivered=False)


def test_updates_that_are_rounded_away_are_no_fault(world: World) -> None:
    for _ in range(10):
        world.step(delivered=False, seen=0.016)


def test_a_prefix_cache_that_is_kept(world: World) -> None:
    world.step()
    world.cached = 32
    for _ in range(KEPT_IN_A_ROW - 1):
        world.step()
    with pytest.raises(LivenessError, match=r"kept its prefix cache .* in 2 probes in a row: 32 of 64 tokens"):
        world.step()


def test_requests_that_were_aborted_say_nothing(world: World) -> None:
    world.aborts = True
    for _ in range(10):
        assert world.step(delivered=False) == {}


def test_a_server_without_log_probs_of_prompts_is_asked_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.engine.score = lambda ids: []  # type: ignore[method-assign]
    world.replica.servers[0].generate.remote = lambda **kwargs: SimpleNamespace(token_ids=[1], extra_fields={})
    for _ in range(4):
        assert world.step() == {}
    assert caplog.text.count("returns no log-probs of prompts") == 1


# Error rates


SEQUENCES, TOKENS = 32, 15


def noise(generator: torch.Generator, size: float) -> Tensor:
    """Noise that is correlated along a sequence, like the noise of 16-bit engines."""
    shared = torch.randn(SEQUENCES, 1, generator=generator, dtype=torch.float64)
    own = torch.randn(SEQUENCES, TOKENS, generator=generator, dtype=torch.float64)
    return size * (shared + own) / math.sqrt(2)


class Engine:
    """A trainer whose log-probs follow a random walk, and an engine that follows them with noise."""

    def __init__(self, seed: int, update: float, precision: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.update, self.precision = update, precision
        self.offset = noise(self.generator, 0.7)  # of the engine at equal weights
        self.own = noise(self.generator, 1.0)

    def step(self) -> tuple[Tensor, Tensor]:
        self.own = self.own + noise(self.generator, self.update)
        return self.own + self.offset + noise(self.generator, self.precision), self.own


def test_hand_worked_change() -> None:
    # Of two sequences <dg, de> is 2 and 1, |de|^2 is 1 and 4: the slope is 3 / 5, what is left of each is
    # 2 - 0.6 = 1.4 and 1 - 2.4 = -1.4, and the error sqrt(2 * 1.96 * 2 / 1) / 5 = 0.56.
    engine = torch.tensor([[2.0, 0.0], [0.5, 7.0]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    change = compare_changes(engine, expected)
    assert change.slope == pytest.approx(0.6)
    assert change.error == pytest.approx(0.56)
    # u is 1 and -3: of the four sums -4, -2, 2, 4 one is below -2, and one equal to it.
    assert change.p == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "precision"), each_nth_by_default(3, [(1.0, 0.5), (1.0, 0.0), (0.2, 0.15), (0.02, 0.5), (0.3, 0.2)])
)
def test_500_healthy_synchronisations_raise_no_alarm(update: float, precision: float) -> None:
    engine, test = Engine(7, update, precision), ProbeTest()
    outcomes = [test.step(*(each.tolist() for each in engine.step())) for _ in range(500)]
    assert {"fails", "differs"}.isdisjoint(outcomes)
    assert outcomes.count("follows") > (100 if update > precision else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "precision", "most"),
    each_nth_by_default(2, [(1.0, 0.1, 3), (0.05, 0.15, 80), (0.2, 0.15, 12), (1.0, 0.5, 6)]),
)
def test_an_engine_that_is_not_updated_fails(update: float, precision: float, most: int) -> None:
    """If one update is below the engine's noise, changes accumulate until they exceed it."""
    for seed in range(20):
        engine, test = Engine(seed, update, precision), ProbeTest()
        kept, _ = engine.step()
        outcomes = []
        for _ in range(most + 1):
            _, own = engine.step()
            again = kept + noise(engine.generator, precision)
            outcomes.append(test.step(again.tolist(), own.tolist()))
        assert "fails" in outcomes
