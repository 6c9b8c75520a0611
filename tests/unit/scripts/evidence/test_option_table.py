"""The table of every option: none is missing, and what is known of single ones exactly."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from tests.support.applications import OPTIONS
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

from enumeration import build, policies
from estimator_catalogue import NONE
from expectation import measure
from option_table import CHOICES, Option, list_options, measure_option

from recipe.offpolicy.correction import CorrectionSpec

WORLD = build(vocabulary=3, length=4, seed=0)
OFF_POLICY, STALE = policies(WORLD, mismatch=0.3, staleness=0.0), policies(WORLD, mismatch=0.3, staleness=0.2)
TIS = {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 1.1}}


def test_none_of_the_catalogue_is_missing() -> None:
    assert {option.name for option in list_options()} == set(OPTIONS) - set(CHOICES)


@pytest.mark.parametrize("option", list(list_options()), ids=lambda option: option.name)
def test_every_option_is_measured(option: Option) -> None:
    for setting in (OFF_POLICY, STALE):
        found = measure_option(option, setting)
        assert all(map(math.isfinite, (found.bias, found.variance, found.score_mean, found.dropped)))
    on_policy = measure_option(option, policies(WORLD, mismatch=0.0, staleness=0.0))
    # Where all policies agree nothing is corrected; VESPO's weight is 1 there too.
    assert on_policy.bias < 1e-9
    assert on_policy.dropped == 0.0


def test_none_is_that_of_the_other_table() -> None:
    (option,) = (each for each in list_options() if each.name == "none")
    for setting in (OFF_POLICY, STALE):
        assert vars(measure_option(option, setting)) == pytest.approx(vars(measure(NONE, setting)), rel=1e-12)


@pytest.mark.parametrize("values", [{}, TIS], ids=["no weight", "truncated"])
def test_centred_scores_have_no_drift_while_pi_is_pi_old(values: dict[str, object]) -> None:
    plain = measure_option(Option("plain", CorrectionSpec.from_mapping(values)), OFF_POLICY)
    centred = Option("centred", CorrectionSpec.from_mapping({**values, "centering": 20}))
    assert plain.score_mean > 1e-2
    assert measure_option(centred, OFF_POLICY).score_mean < 1e-14
    # The ratio pi / pi_old of a later step is not in C.
    assert measure_option(centred, STALE).score_mean > 1e-3
    reused = Option("reused", CorrectionSpec.from_mapping({**values, "centering": 20, "proximal": "reuse"}))
    assert measure_option(reused, STALE).score_mean < 1e-14


def test_the_second_moments_cutoff_keeps_the_budget() -> None:
    (option,) = (each for each in list_options() if each.name == "paper/m2po")
    found = measure_option(option, OFF_POLICY)
    squares = (OFF_POLICY.old - OFF_POLICY.mu).square()
    mass = OFF_POLICY.probability[:, None] / squares.shape[1]
    by_size = sorted(zip(squares.flatten().tolist(), mass.expand_as(squares).flatten().tolist(), strict=True))
    total = weight = 0.0
    for square, share in by_size:
        if (total + share * square) / (weight + share) > 0.04:
            break
        total, weight = total + share * square, weight + share
    assert found.dropped == pytest.approx(1 - weight, abs=1e-9)
    assert torch.isclose(mass.sum() * squares.shape[1], torch.ones((), dtype=torch.float64))
