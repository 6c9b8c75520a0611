"""Bounds that follow a run: their reaction to updates, how they are sent, and what is rejected."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Reduction, Statistic
from recipe.offpolicy.correction.spec import compute_fingerprint, replace_bounds
from recipe.offpolicy.monitor.active_correction import Calibration
from recipe.offpolicy.monitor.bound_settings import find_problems
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import CONFIGS
from tests.support.corrections import GSM, M2PO, TIS, band, opsm, spec
from tests.support.histograms import histogram


def config(correction: CorrectionSpec, **values: Any) -> DictConfig:
    shipped: Any = OmegaConf.load(CONFIGS / "offpolicy_base.yaml")
    calibrate = OmegaConf.merge(shipped.offpolicy.calibrate, values)
    return OmegaConf.create({"offpolicy": {"calibrate": calibrate}, "correction": correction.to_mapping()})


def calibration(correction: CorrectionSpec, **values: Any) -> Calibration:
    return Calibration(config(correction, **({"target_kept": 0.9, "warmup": 1} | values)), correction)


def seen(*distances: float, name: str = "gsm", kept: float = 0.0) -> dict[str, Statistic]:
    """One update in which units of the mask were this far from agreement."""
    counted = torch.ones(len(distances), dtype=torch.bool)
    return {
        f"{name}/distance": histogram(torch.tensor(distances, dtype=torch.float64), counted),
        f"{name}/kept": Statistic(Reduction.MEAN, (kept, float(len(distances)))),
    }


def upper(made: Calibration, name: str = "gsm") -> float:
    return math.log(dict(made.spec.masks)[name].upper or math.nan)


SYMMETRIC = spec(gsm=band(math.exp(-0.01), math.exp(0.01)))


def test_it_waits_and_then_moves_at_its_pace(caplog: pytest.LogCaptureFixture) -> None:
    made = calibration(SYMMETRIC, warmup=2, every=2, rate=0.5)
    course = []
    for _ in range(5):
        made.observe(seen(*[0.1] * 10, kept=3.0))
        course.append(upper(made))
    # Changes after updates 2 and 4, by 1.5 each.
    assert course == pytest.approx([0.01, 0.015, 0.015, 0.0225, 0.0225])
    with caplog.at_level(logging.INFO):
        made.observe(seen(*[0.1] * 10, kept=3.0))
    assert "correction.masks.gsm: [0.977" in caplog.text
    assert (
        "kept 0.3000 of the 60 sequences to which the mask applies, in 6 update(s); offpolicy.calibrate.target_kept=0.9"
        in caplog.text
    )


def test_state_survives_a_checkpoint() -> None:
    correction = spec(opsm=opsm(0.1))

    def of_opsm(*distances: float) -> dict[str, Statistic]:
        return seen(*distances, name="opsm") | {"opsm/noise": seen(*[0.05] * 200)["gsm/distance"]}

    updates = [of_opsm(*[d] * 20) for d in (0.3, 0.02, 0.7, 0.04, 0.2)]
    whole = calibration(correction, window=3, every=2)
    for update in updates:
        whole.observe(update)
    for place in range(len(updates) + 1):
        before, after = calibration(correction, window=3, every=2), calibration(correction, window=3, every=2)
        for update in updates[:place]:
            before.observe(update)
        after.restore(json.loads(json.dumps(before.state())), same_keys=True)
        assert after.bounds == before.bounds
        for update in updates[place:]:
            after.observe(update)
        assert (after.spec, after.state()) == (whole.spec, whole.state())
    assert whole.spec != correction


# How bounds travel ------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_structure() -> None:
    correction = spec(weight=TIS, gsm=band(0.99, 1.01), opsm=opsm(0.1))
    names = ("gsm", "opsm")
    moved = replace_bounds(correction, {"gsm": {"lower": 0.9, "upper": 1.2}, "opsm": {"delta": 0.2}})
    assert compute_fingerprint(moved, names) == compute_fingerprint(correction, names)
    assert compute_fingerprint(correction, ()) == correction.fingerprint()
    # Whatever does not move is in it: other masks, the weight, an open side, the way to bound, which masks move.
    others = [
        compute_fingerprint(correction, ("gsm",)),
        compute_fingerprint(spec(weight=TIS | {"upper": 3.0}, gsm=band(0.99, 1.01), opsm=opsm(0.1)), names),
        compute_fingerprint(spec(weight=TIS, gsm=band(0.99, 1.01), opsm=opsm(0.1, when="any")), names),
        compute_fingerprint(spec(weight=TIS, gsm=band(None, 1.01), opsm=opsm(0.1)), names),
        compute_fingerprint(
            spec(weight=TIS, gsm=band(0.99, 1.01), opsm=band(0.9, None, ratio="full", when="negative")), names
        ),
    ]
    assert len({compute_fingerprint(correction, names), *others}) == 6


# Keys -------------------------------------------------------------------------------------------------------


def found(correction: CorrectionSpec, **values: Any) -> list[str]:
    made = config(correction, **({"target_kept": 0.98} | values))
    return [str(problem) for problem in find_problems(made, Composed(made).spec)]


BY_AGE = {"by_staleness": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("correction", "values", "expected"),
    [
        (spec(gsm=GSM, p=GSM), {}, "2 masks have bounds that could move: gsm, p. Set offpolicy.calibrate.of=[gsm]"),
        (spec(gsm=GSM, m2po=M2PO), {"of": ["m2po"]}, "budget computes a cutoff per batch"),
        (spec(TIS | BY_AGE), {"target_kept": None, "target_ess": 0.9}, "by_staleness=[1.0,2.0] gives each age its own"),
        (spec(opsm=opsm(0.0)), {"of": ["opsm"]}, "lower is at the point of agreement"),
        (replace(spec(opsm=opsm(0.1)), proximal="bypass"), {}, "backend noise cannot be distinguished from drift"),
        (replace(spec(gsm=GSM), skyrl_compat=True), {}, "skyrl_compat=true applies masks one after another"),
    ],
)
def test_what_cannot_be_calibrated(correction: CorrectionSpec, values: dict[str, Any], expected: str) -> None:
    messages = found(correction, **values)
    assert len(messages) == bool(expected)
    assert not expected or expected in messages[0]
