"""The claim of docs/collapse.md, in one process: late weights collapse an uncorrected run, and OPSM prevents the
collapse.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPTS = ROOT / "scripts" / "evidence"
sys.path.insert(0, str(SCRIPTS))

from collapse import analyse, results  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]

SEEDS = (2, 3, 4)


@pytest.mark.timeout(1800)
def test_late_weights_collapse_a_run_and_opsm_keeps_it(tmp_path: Path) -> None:
    """At eta 8, three uncorrected runs end with less reward than they began with, and runs with OPSM end with much
    more.
    """
    names = [f"{arm}-8-0.001-{seed}" for arm in ("none", "opsm") for seed in SEEDS]
    script = SCRIPTS / "collapse" / "in_process.py"
    command = [sys.executable, str(script), *names, "--out", str(tmp_path / "results.parquet")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    table = results.read(tmp_path / "results.parquet")
    late, kept = (analyse.outcomes(table, f"{arm}-8-0.001") for arm in ("none", "opsm"))
    assert (late.index.tolist(), kept.index.tolist()) == ([*SEEDS], [*SEEDS])
    assert (late["outcome"] < late["start"]).all()
    assert (kept["outcome"] > kept["start"]).all()
    assert (kept["outcome"] - late["outcome"]).min() > 0.3
