"""The five metrics to watch: one table for the log and for the documents."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.monitor.alarms.alarm_settings import DEFAULTS
from recipe.offpolicy.monitor.alarms.watched import format_watched, list_watched
from tests.support.corrections import TIS, spec
from tests.support.paths import ROOT


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
