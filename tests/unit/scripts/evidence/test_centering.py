"""Verdicts on the experiment on score centering, by hand."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

import pandas
import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

from collapse import results
from seeds import sign_flip


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, which sets this process's environment for verl on a CPU."""
    monkeypatch.setattr("os.environ", dict(os.environ))
    return importlib.import_module("centering.experiment")


def runs(seeds: int) -> pandas.DataFrame:
    """Centred runs end 0.1 above others in every seed; the last step counts."""
    ends = {"none": 0.2, "centred": 0.3, "tis": 0.4, "tis_centred": 0.4}
    rows = [
        {"arm": arm, "seed": seed, "step": step, "exact": end if step == 60 else 0.9, "k3": 0.05}
        for seed in range(2, 2 + seeds)
        for arm, end in ends.items()
        for step in (20, 60)
    ]
    return pandas.DataFrame(rows)


def test_a_seed_counts_once_all_of_its_arms_have_finished(experiment: ModuleType) -> None:
    table = runs(2)
    short = table[~((table["arm"] == "tis") & (table["seed"] == 3))]
    assert experiment.format_table(short).startswith("1 of 20 seeds")


def test_the_verdict_of_all_seeds(experiment: ModuleType) -> None:
    said = experiment.format_table(runs(20))
    # 2 of 2^20 sign patterns have a mean as large; the other hypothesis has no difference.
    assert sign_flip([0.1] * 20) == pytest.approx(2 / 2**20)
    assert "H1: centred - none +0.100 (+0.100 to +0.100), p = 0.000 (Holm)" in said
    assert "H2: tis_centred - tis +0.000 (+0.000 to +0.000), p = 1.000 (Holm)" in said


def test_the_page_says_what_the_committed_runs_show(experiment: ModuleType) -> None:
    said = experiment.format_table(results.read(ROOT / "scripts" / "evidence" / "centering" / "results.parquet"))
    page = (ROOT / "docs" / "centering.md").read_text()
    assert [line for line in said.splitlines() if line not in page] == []
    assert "20 of 20 seeds" in said
