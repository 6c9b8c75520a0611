"""Masks on probabilities of the sampled token, and on tokens that lead away: by hand, from the peers' public rules."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.support.corrections import kept, run
from tests.support.presets import PRESETS

LOG = math.log


def coins(p: float, q: float) -> float:
    return p * LOG(p / q) + (1 - p) * LOG((1 - p) / (1 - q))


def test_kpop_by_hand() -> None:
    """p_mu = 0.5: KL(0.7, 0.5) = 0.0823 and KL(0.5, 0.7) = 0.0872, kept; at 0.75 they are 0.1308 and 0.1438, dropped.

    From p_mu = 0.02 to 0.08 the ratio is 4, and the two divergences are 0.0568 and 0.0337: kept.
    """
    assert [round(coins(*pair), 4) for pair in ((0.7, 0.5), (0.5, 0.7), (0.08, 0.02))] == [0.0823, 0.0872, 0.0528]
    mu, pi = [[0.5, 0.5, 0.02]], [[0.7, 0.75, 0.08]]
    rows: dict[str, Any] = dict(mu=torch.tensor(mu).log(), old=torch.tensor(mu).log(), pi=torch.tensor(pi).log())
    assert run(PRESETS["paper/kpop"], **rows).keep.tolist() == [[True, False, True]]


def test_nemo_outlier_by_hand() -> None:
    """mean exp|d|: (e^0.5 + e^1 + 1) / 3 = 1.789, kept; (e^1.5 + e^0.5 + 1) / 3 = 2.377, dropped, though d cancels."""
    mu = [[0.5, -1.0, 0.0], [1.5, -0.5, 0.0]]
    assert kept(run(PRESETS["nemo/outlier"], mu=mu, old=torch.zeros(2, 3))) == [True, False]


def test_vaco_by_hand() -> None:
    """|rho - 1| / 2 of rho = 6, 0.5 and 1 is 2.5, 0.25 and 0: mean 0.917, within 1; of rho = 8, 0.5, 1 it is 1.25.

    A > 0 takes rho = 8 further up: dropped. rho = 0.5 is brought back, rho = 1 leads nowhere. A < 0: the reverse.
    """
    near, far = [LOG(6), LOG(0.5), 0.0], [LOG(8), LOG(0.5), 0.0]
    step = run(PRESETS["paper/vaco"], mu=torch.zeros(3, 3), old=[near, far, far], advantages=[1.0, 1.0, -1.0])
    assert step.keep.tolist() == [[True] * 3, [False, True, True], [True, False, True]]
