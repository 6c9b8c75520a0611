"""Panels for TensorBoard and Weights & Biases: metrics that a run logs, in files that the two programs read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # before TensorBoard, which would look for TensorFlow

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.monitor.alarms import list_watched
from recipe.offpolicy.panels import PANELS, main
from tests.support.corrections import GSM, TIS
from tests.support.paths import ROOT
from tests.support.statistics_page import ENTRIES

METRICS = [metric for panels in PANELS.values() for metrics in panels.values() for metric in metrics]
OF_A_RUN = {"delivery/proved", "late_weights/lag"} | {
    f"live/{name}" for name in ("proved", "gradient_tokens", "gradient_error", "shift_error")
}


def test_every_metric_is_logged_by_a_run() -> None:
    known = {key for entry in ENTRIES for key, _ in entry.expand()} | OF_A_RUN
    assert set(METRICS) <= known
    assert len(METRICS) == len(set(METRICS))
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert "live/*" in page
    assert all(metric.split("/")[0] in page for metric in METRICS)


@pytest.mark.parametrize("proximal", ["recompute", "bypass"])
@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no weight"])
def test_the_first_panels_show_the_five_to_watch(proximal: str, weight: bool) -> None:
    ratio = {"ratio": "full"} if proximal == "bypass" else {}
    parts: dict[str, Any] = {"weight": TIS | ratio} if weight else {}
    spec = CorrectionSpec.from_mapping({"proximal": proximal, "masks": {"gsm": GSM | ratio}, **parts})
    shown = {f"offpolicy/{metric}" for metrics in PANELS["Five to watch"].values() for metric in metrics}
    watched = [name for name, *_ in list_watched(spec)]
    if proximal == "recompute" and not weight:  # without a weight these say what kl/k3 says
        watched = [name for name in watched if "rollout_ratio/" not in name]
    assert {*watched[:-1]} <= shown
    assert watched[-1] == "offpolicy/nonfinite/*"
    assert any(name.startswith("offpolicy/nonfinite/") for name in shown)


def test_tensorboard_finds_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    for _ in range(2):  # the second replaces the first
        assert main(["--tensorboard", str(tmp_path)]) == 0
    assert str(tmp_path / "offpolicy_layout") in capsys.readouterr().out
    assert len(list((tmp_path / "offpolicy_layout").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "offpolicy_layout"))
    events.Reload()
    (tensor,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    found = {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in layout.category
    }
    assert {section: list(charts) for section, charts in found.items()} == {
        section: list(panels) for section, panels in PANELS.items()
    }
    (pattern,) = found["Five to watch"]["KL(mu, pi_old), nats per token"]
    assert re.match(pattern, "offpolicy/kl/k3")
    assert not re.match(pattern, "offpolicy/kl/k31")


@pytest.mark.parametrize("project", ["name", "/name", "a/b/c", ""])
def test_a_bad_project_is_refused(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--wandb", project])
    assert "is not ENTITY/PROJECT" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.extended
def test_the_workspace_is_valid(tmp_path: Path) -> None:
    """By the models of wandb-workspaces, in an environment that has it; nothing is sent."""
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    (packages,) = (tmp_path / "environment").glob("lib/python3*/site-packages")
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join([*theirs, str(ROOT)]) + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "wandb-workspaces"], check=True, timeout=600)
    out = tmp_path / "workspace.json"
    command = [python, "-m", "recipe.offpolicy.panels", "--wandb", "team/run", "--out", out]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    check = (
        f"from wandb_workspaces.workspaces.internal import View; View.model_validate_json(open({str(out)!r}).read())"
    )
    subprocess.run([python, "-c", check], cwd=tmp_path, check=True, timeout=300)
    written = json.loads(out.read_text())
    assert (written["entity"], written["project"], written["displayName"]) == ("team", "run", "Off-policy")
    sections = written["spec"]["section"]["panelBankConfig"]["sections"]
    drawn = {
        section["name"]: {panel["config"]["chartTitle"]: panel["config"]["metrics"] for panel in section["panels"]}
        for section in sections
    }
    assert drawn == {
        section: {title: [f"offpolicy/{metric}" for metric in metrics] for title, metrics in panels.items()}
        for section, panels in PANELS.items()
    }
