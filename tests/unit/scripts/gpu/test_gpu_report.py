"""The GPU report on a CPU: its dry run, and its results if something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import kit
from tests.support.paths import ROOT

pytestmark = pytest.mark.verl("==0.9.1")


def build_command(out: Path, *arguments: str) -> list[str]:
    return ["bash", str(ROOT / "scripts" / "gpu.sh"), "--out", str(out), *arguments]


def report(out: Path, *arguments: str, **environment: str) -> tuple[int, Any, str]:
    """Return the exit status, what was written, and what was printed."""
    environment = {**os.environ, "VENV": sys.prefix, **environment}
    done = subprocess.run(build_command(out, *arguments), env=environment, capture_output=True, text=True, timeout=800)
    written = json.loads(out.read_text()) if out.is_file() else None
    return done.returncode, written, done.stdout + done.stderr


def statuses(written: Any) -> dict[str, str]:
    return {name: part["status"] for name, part in written["parts"].items()}


@pytest.mark.extended
def test_a_dry_run_measures_all_that_needs_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    chosen = [part for part in kit.PARTS if part != "training"]
    status, written, said = report(out, "--dry-run", "--only", *chosen)
    assert statuses(written) == dict.fromkeys(chosen, "ok"), said
    assert status == 0
    found = {name: part["figures"] for name, part in written["parts"].items()}
    assert found["parity"]["float32, sdpa, padded"]["stacked"]["gradient"] < 1e-5
    assert found["parity"]["bfloat16, sdpa, packed"]["proof"]["proved"] == 1.0
    assert found["ranks"]["backend"] == "gloo"
    assert found["ranks"]["batch_wide"]["gradient"] < 1e-5
    # What a CPU cannot show is not a number.
    assert found["loss"]["corrected"] == {"bytes": None, "synchronisations": None}
    assert found["step"]["device"] == "cpu"
    page = out.with_suffix(".txt").read_text()
    assert page in said
    assert "DRY RUN on a CPU: no figure comes from a GPU" in page.splitlines()[0]
    assert len(page.splitlines()) < 60
    for text in (page, out.read_text()):
        assert str(ROOT) not in text
        assert str(Path.home()) not in text


def test_without_a_device_it_names_what_hides_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    status, written, said = report(tmp_path / "r.json", "--only", "environment", "loss", CUDA_VISIBLE_DEVICES="")
    assert status == 1
    assert statuses(written) == {"environment": "FAILED", "loss": "skipped"}
    assert "finds no CUDA device with CUDA_VISIBLE_DEVICES=''. Fix: make one visible, or add --dry-run." in said


def test_a_missing_package_is_named_and_other_parts_run(tmp_path: Path) -> None:
    for name in ("torch", "verl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'raise ModuleNotFoundError("No module named {name!r}")')
    out = tmp_path / "r.json"
    status, written, said = report(out, "--dry-run", "--only", "parity", "step", PYTHONPATH=str(tmp_path))
    assert (status, statuses(written)) == (1, {"parity": "FAILED", "step": "FAILED"})
    assert "exit status 1: ModuleNotFoundError: No module named 'torch'" in said
    assert written["parts"]["parity"]["log"], "the end of its output is sent, too"
