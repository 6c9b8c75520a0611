"""Each alarm looks at a statistic that the correction in force really gives; the five metrics to watch."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.monitor.alarms.alarm_settings import (
    DEFAULTS,
    NAMES,
    OF_EXTENSIONS,
    explain_constant,
    find_statistic,
    read_value,
)
from recipe.offpolicy.monitor.alarms.watched import format_watched, list_watched
from tests.support.corrections import GSM, TIS, opsm, run, spec, values
from tests.support.paths import ROOT

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "weight": {"weight": TIS},
    "self-normalised": {"weight": TIS | {"normalize": True}},
    "mask": {"masks": {"gsm": GSM}},
    "reuse": {"weight": TIS, "proximal": "reuse"},
    "bypass": {"proximal": "bypass", "masks": {"opsm": opsm(0.1)}},
}
# What each looks at; the others are keep/token_share and nonfinite for all.
LOOKS_AT = {
    "none": ("rollout_ratio/ess", "rollout_ratio/mean", "kl/k3"),
    "weight": ("weight/ess", "weight/mean", "kl/k3"),
    "self-normalised": ("weight/ess", "raw_weight/mean", "kl/k3"),
    "mask": ("rollout_ratio/ess", "rollout_ratio/mean", "kl/k3"),
    "reuse": ("weight/ess", "weight/mean", "kl/k3"),
    "bypass": ("full_ratio/ess", "full_ratio/mean", "full_ratio/chi2"),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_stages_give_what_alarms_look_at(name: str) -> None:
    spec = CorrectionSpec.from_mapping(CORRECTIONS[name])
    looked = tuple(find_statistic(alarm, spec) for alarm in ("ess", "mean_weight", "mismatch_growth"))
    assert looked == LOOKS_AT[name]
    # pi / mu is e^0.3 on one token of two; under bypass pi_old is mu.
    mu = [[-1.0, -1.0]]
    old = mu if name == "bypass" else [[-0.7, -1.0]]
    shown = values(run(spec, mu=mu, old=old, pi=[[-0.7, -1.0]], advantages=-1.0))
    found = {alarm: read_value(alarm, spec, shown) for alarm in NAMES if alarm not in ("kept_share", *OF_EXTENSIONS)}
    assert all(math.isfinite(value) for value in found.values())
    # Two weights 1 and e^0.3 = 1.34986: mean 1.17493, ess (2.34986)^2 / (2 x 2.82212) = 0.97831; normalised the
    # same ess. k3 = (1.34986 - 1 - 0.3) / 2 = 0.02493; chi2 = (2.82212) / 2 - 1 = 0.41106.
    assert found["ess"] == pytest.approx(0.97831, abs=1e-5)
    assert found["mean_weight"] == pytest.approx(1.17493, abs=1e-5)
    assert found["mismatch_growth"] == pytest.approx(0.41106 if name == "bypass" else 0.02493, abs=1e-5)
    assert found["nonfinite"] == 0.0


def test_all_that_is_not_finite_is_counted_together() -> None:
    spec = CorrectionSpec.from_mapping({"weight": TIS})
    counted = {"nonfinite/rollout_log_prob": 2.0, "nonfinite/old_log_prob": 1.0, "nonfinite/log_prob": 0.0}
    assert read_value("nonfinite", spec, counted) == 3.0
    assert math.isnan(read_value("nonfinite", spec, {}))
    assert math.isnan(read_value("ess", spec, {}))


@pytest.mark.parametrize(
    ("mapping", "moves"),
    [
        ({}, False),
        ({"weight": TIS}, False),
        ({"weight": TIS | {"kind": "reject", "lower": 0.5}}, True),
        ({"masks": {"gsm": GSM}}, True),
    ],
)
def test_without_anything_that_rejects_the_kept_share_stays(mapping: dict[str, Any], moves: bool) -> None:
    spec = CorrectionSpec.from_mapping(mapping)
    assert (explain_constant("kept_share", spec) == "") is moves
    assert explain_constant("ess", spec) == ""


def test_an_extensions_metric_is_read_by_its_full_name() -> None:
    spec = CorrectionSpec.from_mapping({"weight": TIS})
    assert find_statistic("opd_overlap", spec) == "opd/gap/extreme_share"
    assert read_value("opd_overlap", spec, {"opd/gap/extreme_share": 0.25}) == 0.25


def test_an_unknown_alarm_is_an_error() -> None:
    with pytest.raises(ValueError, match="no alarm 'entropy'"):
        find_statistic("entropy", CorrectionSpec())


def test_the_page_begins_with_the_table_of_the_code() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    section = page[page.index("## Five to watch") : page.index("## All metrics")]
    rows = re.findall(r"^\| `(.*)` \| (.*) \| (.*) \|$", section, re.M)
    assert rows == list(list_watched(spec(TIS)))
    assert len(rows) == 5


@pytest.mark.parametrize("correction", [spec(TIS), CorrectionSpec()], ids=["weight", "none"])
def test_a_run_prints_its_own_bounds(correction: CorrectionSpec) -> None:
    alarms = OmegaConf.merge(DEFAULTS, {"ess": {"lower": 0.7}, "mean_weight": {"upper": None}})
    _title, *lines = format_watched(correction, OmegaConf.create({"offpolicy": {"alarms": alarms}}))
    assert len(lines) == 5
    ratio = "weight" if correction.all_weights else "rollout_ratio"
    assert lines[1].startswith(f"  offpolicy/{ratio}/ess: >= 0.7; ")
    assert lines[2].startswith(f"  offpolicy/{ratio}/mean: >= 0.5; ")
