from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.delivery.probe import IN_A_ROW, LEVEL, RESOLVED, ProbeTest, compare_changes

SEQUENCES, TOKENS = 32, 15


def noise(generator: torch.Generator, size: float) -> Tensor:
    """Noise that is correlated along a sequence, as that of 16-bit engines."""
    shared = torch.randn(SEQUENCES, 1, generator=generator, dtype=torch.float64)
    own = torch.randn(SEQUENCES, TOKENS, generator=generator, dtype=torch.float64)
    return size * (shared + own) / math.sqrt(2)


class Engine:
    """A trainer whose log-probs walk, and an engine that follows them but for its noise."""

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


def test_no_expected_change_is_no_verdict() -> None:
    nothing = torch.zeros(4, 3, dtype=torch.float64)
    change = compare_changes(torch.ones_like(nothing), nothing)
    assert math.isnan(change.slope)
    assert change.error == math.inf


def test_p_values_are_uniform_if_the_weights_are_delivered() -> None:
    values = []
    for seed in range(500):
        generator = torch.Generator().manual_seed(seed)
        expected = noise(generator, 1.0)
        values.append(compare_changes(expected + noise(generator, 0.5), expected, seed=seed).p)
    ranked = torch.tensor(values, dtype=torch.float64).sort().values
    steps = torch.arange(1, 501, dtype=torch.float64) / 500
    distance = float(torch.maximum((ranked - steps).abs(), (ranked - steps + 1 / 500).abs()).max())
    assert distance < 1.63 / math.sqrt(500)  # Kolmogorov and Smirnov at 1 %


@pytest.mark.slow
@pytest.mark.parametrize(("update", "precision"), [(1.0, 0.0), (1.0, 0.5), (0.2, 0.15), (0.02, 0.5), (0.3, 0.2)])
def test_500_healthy_synchronisations_raise_no_alarm(update: float, precision: float) -> None:
    engine, test = Engine(7, update, precision), ProbeTest()
    outcomes = [test.step(*(each.tolist() for each in engine.step())) for _ in range(500)]
    assert {"fails", "differs"}.isdisjoint(outcomes)
    assert outcomes.count("follows") > (100 if update > precision else 0)


def test_the_probability_of_stopping_a_healthy_run_of_1000_synchronisations() -> None:
    assert 1000 * LEVEL**IN_A_ROW < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "precision", "most"), [(1.0, 0.1, 3), (1.0, 0.5, 6), (0.2, 0.15, 12), (0.05, 0.15, 80)]
)
def test_an_engine_that_is_not_updated_fails(update: float, precision: float, most: int) -> None:
    """Where one update is below the engine's noise, changes accumulate until they are not."""
    for seed in range(20):
        engine, test = Engine(seed, update, precision), ProbeTest()
        kept, _ = engine.step()
        outcomes = []
        for _ in range(most + 1):
            _, own = engine.step()
            again = kept + noise(engine.generator, precision)
            outcomes.append(test.step(again.tolist(), own.tolist()))
        assert "fails" in outcomes


def test_changes_below_the_noise_are_no_verdict() -> None:
    """Weights that began on the grid of bfloat16: an expected change of 0.02 against noise of 0.48."""
    engine, test = Engine(3, 0.0, 0.48), ProbeTest()
    for step in range(10):
        answers, own = engine.step()
        moved = own + noise(torch.Generator().manual_seed(step), 0.02)
        assert test.step(answers.tolist(), moved.tolist()) in ("first", "unresolved")
        assert test.change.error > RESOLVED
