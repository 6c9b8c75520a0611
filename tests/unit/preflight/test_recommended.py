"""One recommendation for asynchronous and stale data, in the code and in the documents."""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path

import pytest

from recipe.offpolicy.analysis.attribution.attribution import attribute
from recipe.offpolicy.analysis.report.timeline import build_timeline
from recipe.offpolicy.analysis.report.verdict import COMPARED, build_answers, run_studies
from recipe.offpolicy.correction import CorrectionSpec, recommended
from recipe.offpolicy.monitor.alarms import StaleRowsWatch
from recipe.offpolicy.preflight.auto_choice import Setup, select
from recipe.offpolicy.preflight.checks.staleness import warn_asynchronous
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.recording import Recording
from tests.support.applications import NEEDED, application
from tests.support.paths import ROOT

LINE = "correction=opsm correction.masks.opsm.delta=0.1"
STALE = ROOT / "tests/data/faults/held_out/colocate_async-14"


def test_the_documents_recommend_the_arm_that_was_measured() -> None:
    assert recommended.LINE == LINE
    (row,) = re.findall(r"^\| [^|]*asynchronous[^|]*\| `([^`]*)` \|", (ROOT / "README.md").read_text(), re.M)
    assert row == f"+correction@{LINE}"
    pages = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("staleness", "auto", "collapse")}
    (auto,) = re.findall(r"^\| async \| `([^`]*)`", pages["auto"], re.M)
    assert f"correction={auto}" == LINE
    assert LINE in pages["staleness"]
    assert LINE in pages["collapse"]
    whole = (ROOT / "docs/evidence/collapse.md").read_text()
    medians = dict(re.findall(r"^\| `(\w+)` \| 8 of 8 \| (\d\.\d+)", whole, re.M))
    assert medians["late_opsm"] == "0.602"
    assert all(medians[arm] in recommended.WHY for arm in ("late_opsm", "late", "late_decoupled", "late_both"))
    arms = (ROOT / "scripts/evidence/collapse/arms.py").read_text()
    assert all(f'"{override}"' in arms for override in recommended.OVERRIDES)


@pytest.mark.verl("==0.9.1")
def test_an_uncorrected_asynchronous_run_is_told_of_it() -> None:
    with application("correction=none", "trainer.v1.trainer_mode=colocate_async", *NEEDED) as config:
        (note,) = warn_asynchronous(Composed(config, CorrectionSpec()))
    assert note.verdict == "NOTE"
    assert LINE in note.fix


def test_auto_doctor_attribution_and_report_give_the_same() -> None:
    chosen = select(Setup("different", "async", "dense", "single", 4, "fsdp"))
    assert (*(f"correction={name}" for name in chosen.options), *(f"{k}={v}" for k, v in chosen.values.items())) == (
        tuple(LINE.split())
    )
    recording = Recording(STALE)
    (stale,) = (cause for cause in attribute(recording).causes if cause.name == "stale weights")
    assert stale.fix.endswith(LINE)
    assert tuple(LINE.split()) in COMPARED
    studies = run_studies(recording, CorrectionSpec(), stale=True)
    assert not isinstance(studies.calibrated, str)
    assert {proposal.part.key for proposal in studies.calibrated.proposals} == {"masks.opsm"}
    answers = build_answers(build_timeline(recording), CorrectionSpec(), {}, studies)
    (bound,) = (answer for answer in answers if answer.question.startswith("Which bound"))
    assert (bound.answer, "keeps 29.2% of rows with A < 0" in bound.because) == ("delta=0.1", True)
    assert not isinstance(studies.study, str)
    assert {LINE, "correction=decoupled_ppo"} <= {outcome.candidate.label for outcome in studies.study.outcomes}


@pytest.mark.parametrize(
    ("name", "bounds"), [("healthy-10", ["[0.9821, 1.0182]", "no cap needed"]), ("stale-3-20", ["delta=0.1"])]
)
def test_each_verdict_on_a_bound_says_what_is_known(name: str, bounds: list[str]) -> None:
    """Weights that arrive late are stale too, though verl's versions say that they are fresh."""
    recording = Recording(STALE.parent / name)
    studies = run_studies(recording, CorrectionSpec())
    answers = build_answers(build_timeline(recording), CorrectionSpec(), {}, studies)
    assert [answer.answer for answer in answers if answer.question.startswith("Which bound")] == bounds


def test_noise_is_bounded_at_the_quantile_that_a_short_recording_has() -> None:
    """256 rows at pi = pi_old bound the 0.95-quantile of the noise, and the 0.99 takes 299."""
    recording = Recording(STALE.parent / "healthy-10")
    studies = run_studies(recording, CorrectionSpec(), spec=["correction=opsm"])
    assert not isinstance(studies.calibrated, str)
    (proposal,) = studies.calibrated.proposals
    assert proposal.threshold.values == {"delta": pytest.approx(0.101)}
    assert proposal.floor is not None
    assert proposal.floor.share == 0.95


def test_run_async_has_it_as_its_default(tmp_path: Path) -> None:
    """Its command line, with a python3 that prints its arguments."""
    (tmp_path / "verl/trainer/config").mkdir(parents=True)
    (tmp_path / "verl/version").mkdir()
    (tmp_path / "verl/trainer/config/ppo_trainer.yaml").write_text("    separate_async:\n")
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/bash\nif [[ $1 == - ]]; then echo "{tmp_path}/verl"; else printf "%s\\n" "$@"; fi\n')
    python.chmod(0o755)

    def run(*arguments: str, **environment: str) -> list[str]:
        script = ["bash", str(ROOT / "recipe/offpolicy/run_async.sh"), *arguments]
        path = f"{tmp_path}:/usr/bin:/bin"
        done = subprocess.run(script, env={"PATH": path, "HOME": str(tmp_path)} | environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        return [word for word in done.stdout.decode().splitlines() if word.startswith("correction")]

    assert run() == ["correction=[opsm]", "correction.masks.opsm.delta=0.1"]
    assert run("correction.masks.opsm.delta=0.2")[-1] == "correction.masks.opsm.delta=0.2"
    assert run(CORRECTION="tis_token") == ["correction=[tis_token]"]
    assert run("correction=gsm") == ["correction=gsm"]


# Bounds for equal weights meet stale rows ---------------------------------------------------------------------


def test_a_run_that_keeps_no_stale_token_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def update(kept: float, tokens: float = 1000.0) -> dict[str, float]:
        fresh = {"staleness/is0/token_count": 5000.0, "staleness/is0/keep_token_share": 0.9}
        ages = {"staleness/is1/token_count": tokens, "staleness/is1/keep_token_share": kept}
        return fresh | ages | {"staleness/is2/token_count": 0.0, "staleness/is2/keep_token_share": float("nan")}

    watch = StaleRowsWatch()
    with caplog.at_level(logging.WARNING, "verl.offpolicy"):
        warned = []
        for one in (update(0.0), update(0.5), update(0.01), update(0.0), update(0.0)):
            watch.see(one)
            warned.append(len(caplog.records))
    assert warned == [0, 0, 0, 1, 1]
    assert "keeps 0.000 of the tokens that older weights sampled, 1000 in this update" in caplog.text
    assert LINE in caplog.text
    young = StaleRowsWatch()
    for values in [update(0.0, tokens=50.0)] * 5 + [{}] * 5:
        young.see(values)
    assert len(caplog.records) == 1
