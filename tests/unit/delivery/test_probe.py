from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.offpolicy.delivery.probe import IN_A_ROW, KEPT_IN_A_ROW, Probe, draw_probe, join_responses
from recipe.offpolicy.proof.verify import LivenessError

ROWS = [([number, 1, 2], [3, 4, 5, number % 7]) for number in range(16)]


def test_sequences_are_of_different_prompts_first() -> None:
    rows = [([9, 1], [2, 3]), ([9, 1], [4, 5]), ([8, 1], [2, 3]), ([9, 1], [2, 3])]
    assert draw_probe(rows, ["a", "a", "b", "a"]) == [[9, 1, 2, 3], [8, 1, 2, 3], [9, 1, 4, 5]]


def test_the_request_that_is_not_cached_is_of_responses() -> None:
    assert join_responses([([1], [2, 3]), ([4], [5, 6])], 3) == [2, 3, 5]
    assert join_responses([([1], [2, 3])], -1) == []


class Model:
    """Log-probs of sequences by one weight a token id."""

    def __init__(self) -> None:
        self.weight = torch.zeros(32, dtype=torch.float64)

    def score(self, ids: list[int]) -> list[float]:
        return (self.weight[ids[1:]] * torch.tensor(ids[:-1]).double() / 8).tolist()


class World:
    """A trainer, a server that answers at once, and a fault by which it does not follow."""

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
        """One synchronisation, the next batch, an update."""
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
    with pytest.raises(
        LivenessError, match="kept its prefix cache after receiving new weights, in 2 probes in a row: 32 of 64 tokens"
    ):
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
