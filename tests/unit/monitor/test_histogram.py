"""The distance of units from agreement leads to the mask's decisions, and parts add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.analysis.calibration.parts import list_parts
from recipe.offpolicy.analysis.calibration.scores import compute_scores
from recipe.offpolicy.correction import CorrectionSpec, Statistic
from recipe.offpolicy.correction.spec import Side
from recipe.offpolicy.correction.statistics import fetch, merge_all
from recipe.offpolicy.monitor.moving_bounds import EDGES, defer_histograms
from recipe.offpolicy.recording import Step
from tests.support.acted import varied_rows
from tests.support.corrections import band, opsm, spec, tensor
from tests.support.drawn import Rows, batches, examples
from tests.support.recordings import NONE


def shown(correction: CorrectionSpec, sides: dict[str, Side], **given: Any) -> dict[str, Statistic]:
    """Histograms of rows given as nested lists, with advantages per row or token; by default, all tokens are in the
    mask.
    """
    mu, old = tensor(given["mu"]), tensor(given["old"])
    pi = tensor(given.get("pi", given["old"]))
    advantages = tensor(given.get("advantages", [1.0] * len(mu)))
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(mu.shape)
    staleness = given.get("staleness")
    reading = defer_histograms(
        correction,
        sides,
        old_log_prob=old,
        rollout_log_prob=mu,
        log_prob=pi,
        response_mask=torch.as_tensor(given.get("mask", torch.ones_like(mu, dtype=torch.bool).tolist())),
        advantages=advantages,
        staleness=None if staleness is None else torch.as_tensor(staleness),
    )
    (found,) = fetch([reading])
    return dict(found)


def bins(statistic: Statistic) -> dict[int, float]:
    """Bin -> count, for bins that are not empty."""
    return {place: float(count) for place, count in enumerate(statistic.parts) if count}


def bin_of(distance: float) -> int:
    return next((place for place, edge in enumerate(EDGES) if distance <= edge), len(EDGES))


@pytest.mark.parametrize(("level", "sign"), [("token", "token"), ("sequence", "row"), ("turn", "token")])
def test_a_run_and_a_recording_count_the_same(level: str, sign: str) -> None:
    rows = varied_rows(30, seed=1)
    rows = replace(rows, advantages=np.random.default_rng(2).standard_normal(rows.tokens).astype(np.float32))
    correction = spec(opsm=opsm(0.01, level=level, sign=sign))
    (part,) = list_parts(correction)
    offline = compute_scores([Step(rows, NONE, ())], correction, [part])[0][part.key]
    padded = rows.padded("rollout_log_prob", "old_log_prob", "log_prob", "advantages", "turn")
    (online,) = fetch(
        [defer_histograms(correction, {"opsm": "lower"}, segment_ids=padded.pop("turn").long(), **padded)]
    )
    kept = offline.looked & ~offline.find_outside(correction.masks[0][1].limits)
    assert online["opsm/kept"].parts == (float(kept.sum()), float(offline.looked.sum()))
    assert 0 < kept.sum() < offline.looked.sum() < len(offline)


def test_noise_is_of_rows_whose_weights_are_equal_and_of_pi_old() -> None:
    # pi has moved to -1.5; backend noise is mu / pi_old, 0.12 and 0.2 nats, and the second row is stale.
    given: dict[str, Any] = dict(
        mu=[[-1.0]] * 2, old=[[-1.12], [-1.2]], pi=[[-1.5]] * 2, advantages=[-1.0] * 2, staleness=[0, 2]
    )
    seen = shown(spec(opsm=opsm(0.1)), {"opsm": "both"}, **given)
    assert bins(seen["opsm/noise"]) == {bin_of(0.12): 1.0}
    assert bins(seen["opsm/distance"]) == {bin_of(0.5): 2.0}
    assert "m/noise" not in shown(spec(m=opsm(0.1, ratio="ppo")), {"m": "both"}, **given)


@examples
@given(batch=batches(), cut=draw.integers(0, 6))
def test_parts_add_up_to_the_whole(batch: Rows, cut: int) -> None:
    correction = spec(gsm=band(0.9, 1.1), opsm=opsm(0.1), icepop=band(0.5, 2.0, level="token"))
    sides: dict[str, Side] = {"gsm": "both", "opsm": "both", "icepop": "upper"}

    def of(part: Rows) -> dict[str, Statistic]:
        reading = defer_histograms(
            correction,
            sides,
            old_log_prob=part.old,
            rollout_log_prob=part.mu,
            log_prob=part.pi,
            response_mask=part.mask,
            advantages=part.advantages,
        )
        (found,) = fetch([reading])
        return dict(found)

    assert merge_all([of(batch[:cut]), of(batch[cut:])]) == of(batch)
