"""The enumerated evidence: its figures by hand, a check that no option is missing, and a check that its assertions can
fail.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

import estimators
from enumeration import Estimator, Policies, build, list_options, measure, policies
from estimator_claims import ESTIMATORS, NONE, SEQUENCE_IS, TOKEN_IS, build_estimator
from estimators import EvidenceSettings

SMALL = EvidenceSettings(
    vocabulary=3,
    length=4,
    mismatches=(0.003, 0.01, 1.0),
    plane=1.0,
    stalenesses=(0.0, 0.3),
    worlds=2,
    lengths=(10, 100),
    rows=200,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors are faster with one thread, especially if other processes use the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def truncated_token(upper: float) -> Estimator:
    weight = {"level": "token", "kind": "truncate", "lower": None, "upper": upper}
    return build_estimator("token TIS", "token weight", weight=weight)


def coin() -> Policies:
    """One token of two: mu = (1/4, 3/4), pi = pi_old = (1/2, 1/2), R = (1, 0), scores +-(1/2, -1/2)."""
    half = torch.tensor([[0.5], [0.5]], dtype=torch.float64).log()
    return Policies(
        mu=torch.tensor([[0.25], [0.75]], dtype=torch.float64).log(),
        old=half,
        pi=half,
        scores=torch.tensor([[[0.5, -0.5]], [[-0.5, 0.5]]], dtype=torch.float64),
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        gradient=torch.tensor([0.25, -0.25], dtype=torch.float64),  # 1/2 x 1 x (1/2, -1/2)
        features=torch.ones(2, 1, 1, dtype=torch.float64),
        all_mu=torch.tensor([0.25, 0.75], dtype=torch.float64).log().expand(2, 1, 2),
        all_pi=torch.tensor([0.5, 0.5], dtype=torch.float64).log().expand(2, 1, 2),
    )


# With A = R - 1/4 = (3/4, -1/4) and rho = (2, 2/3), E[g] = x (1/2, -1/2) with
# x = 1/4 w_0 3/4 + 3/4 w_1 1/4 = 3/16 (w_0 + w_1), where the true gradient has x = 1/2.
@pytest.mark.parametrize(
    ("estimator", "bias", "variance", "score_mean"),
    [
        # w = (1, 1): x = 3/8, bias 1/4; E|g|^2 = (1/4 9/16 + 3/4 1/16) / 2 = 3/32, |E g|^2 = 9/128;
        # score mean (1/4 - 3/4) (1/2, -1/2), of length sqrt(1/8)
        (NONE, 1 / 4, 3 / 32 - 9 / 128, math.sqrt(1 / 8)),
        # w = (2, 2/3): x = 1/2; E|g|^2 = (1/4 4 9/16 + 3/4 4/9 1/16) / 2 = 7/24, |E g|^2 = 1/8
        (TOKEN_IS, 0.0, 7 / 24 - 1 / 8, 0.0),
        (SEQUENCE_IS, 0.0, 7 / 24 - 1 / 8, 0.0),
        # w = (3/2, 2/3): x = 13/32, bias 3/16; score mean 3/8 - 1/2 = -1/8 times (1/2, -1/2);
        # E|g|^2 = (1/4 9/4 9/16 + 3/4 4/9 1/16) / 2 = 259/1536, |E g|^2 = 169/2048
        (truncated_token(1.5), 3 / 16, 259 / 1536 - 169 / 2048, math.sqrt(1 / 128)),
    ],
    ids=lambda value: value.name if isinstance(value, Estimator) else "",
)
def test_one_token_of_two_by_hand(estimator, bias, variance, score_mean):
    measured = measure(estimator, coin())
    assert measured.bias == pytest.approx(bias, abs=1e-12)
    assert measured.variance == pytest.approx(variance, rel=1e-12)
    assert measured.score_mean == pytest.approx(score_mean, abs=1e-12)
    assert measured.cosine == pytest.approx(1.0)
    assert measured.dropped == 0.0


def test_a_mask_by_hand():
    # rho = 2 is outside [0.5, 1.9]: x = 3/16 (0 + 1), bias 5/8; a quarter of mu's tokens is removed.
    mask = {"ratio": "rollout", "level": "sequence", "aggregate": "product", "lower": 0.5, "upper": 1.9, "when": "any"}
    measured = measure(build_estimator("mask", "mask", masks={"mask": mask}), coin())
    assert measured.bias == pytest.approx(5 / 8)
    assert measured.dropped == pytest.approx(1 / 4)
    # x = 3/16, variance 3/4 1/16 / 2 - 9/512 = 3/512 over the squared bias (5/16)^2 / 2 = 25/512
    assert measured.break_even == pytest.approx(3 / 25)


@pytest.mark.slow
def test_a_small_run_prints_every_estimator_and_draws(tmp_path, capsys):
    assert estimators.main(["--out", str(tmp_path / "deeper" / "a.png")], SMALL) == 0
    first = capsys.readouterr().out
    assert estimators.main(["--out", str(tmp_path / "b.png")], SMALL) == 0
    second = capsys.readouterr().out
    assert first.count("holds: ") == 8
    assert all(first.count(estimator.name) >= 7 for estimator in ESTIMATORS)
    assert "|E[g] - grad J|" in first
    assert first.splitlines()[:-1] == second.splitlines()[:-1]
    assert (tmp_path / "deeper" / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


WORLD = build(vocabulary=3, length=4, seed=0)
OFF_POLICY, STALE = policies(WORLD, mismatch=0.3, staleness=0.0), policies(WORLD, mismatch=0.3, staleness=0.2)
TIS = {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 1.1}}


@pytest.mark.parametrize("option", list(list_options()), ids=lambda option: option.name)
def test_every_option_is_measured(option: Estimator) -> None:
    for setting in (OFF_POLICY, STALE):
        found = measure(option, setting, turns=2)
        assert all(map(math.isfinite, (found.bias, found.variance, found.score_mean, found.dropped)))
    on_policy = measure(option, policies(WORLD, mismatch=0.0, staleness=0.0), turns=2)
    # Where all policies agree nothing is corrected; VESPO's weight is 1 there too.
    assert on_policy.bias < 1e-9
    assert on_policy.dropped == 0.0


@pytest.mark.parametrize("values", [{}, TIS], ids=["no weight", "truncated"])
def test_centred_scores_have_no_drift_while_pi_is_pi_old(values: dict[str, object]) -> None:
    plain = measure(build_estimator("plain", "option", **values), OFF_POLICY)
    centred = build_estimator("centred", "option", **values, centering=20)
    assert plain.score_mean > 1e-2
    assert measure(centred, OFF_POLICY).score_mean < 1e-14
    # The ratio pi / pi_old of a later step is not in C.
    assert measure(centred, STALE).score_mean > 1e-3
    reused = build_estimator("reused", "option", **values, centering=20, proximal="reuse")
    assert measure(reused, STALE).score_mean < 1e-14
