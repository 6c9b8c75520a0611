"""The exported recipe: small, in the form that verl's collection requires, and equal to the package's own numbers."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from scripts import export_recipe
from tests.support.paths import ROOT

SCRIPT = ROOT / "scripts" / "export_recipe.py"
RULES = ROOT / "tests" / "data" / "verl_recipe_ruff.toml"
OTHERS: dict[str, dict[str, Any]] = {
    "clip": {"weight": {"level": "sequence", "kind": "clip", "lower": 0.8, "upper": 1.2, "aggregate": "geometric"}},
    "open": {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": None}},
    "positive": {
        "masks": {
            "far": {"ratio": "full", "level": "token", "aggregate": "product", "lower": 0.7, "upper": None},
            "up": {"ratio": "rollout", "level": "token", "aggregate": "any", "lower": None, "upper": 1.5},
        }
    },
}
OTHERS["positive"]["masks"]["far"]["when"], OTHERS["positive"]["masks"]["up"]["when"] = "positive", "any"


def export(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that contains the exported recipe, on this process's path."""
    folder = tmp_path_factory.mktemp("recipes")
    done = export(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == export_recipe.NAME]:
        del sys.modules[name]


def load(module: str) -> Any:
    return importlib.import_module(f"{export_recipe.NAME}.{module}")


def test_it_is_small_and_updated_in_place(exported: Path, tmp_path: Path) -> None:
    folder = exported / export_recipe.NAME
    lines = sum(len(path.read_text().splitlines()) for path in folder.rglob("*") if path.suffix not in (".pyc", ""))
    assert 500 < lines <= 2000
    assert export(exported).returncode == 0
    (tmp_path / export_recipe.NAME).mkdir()
    (tmp_path / export_recipe.NAME / "mine.py").write_text("mine\n")
    refused = export(tmp_path)
    assert refused.returncode == 2
    assert "mine.py is not part of the export" in refused.stdout
    assert len(list((tmp_path / export_recipe.NAME).iterdir())) == 1


@pytest.mark.skipif(not shutil.which("ruff"), reason="needs ruff")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_it_passes_their_lint(command: list[str], exported: Path) -> None:
    ruff = ["ruff", *command, "--no-cache", "--config", str(RULES), export_recipe.NAME]
    done = subprocess.run(ruff, cwd=exported, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def read_option(name: str) -> dict[str, Any]:
    if name in OTHERS:
        return OTHERS[name]
    option: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "correction" / f"{name}.yaml").read_text())
    for mask in option.get("masks", {}).values():
        if mask.get("delta") == "???":
            mask["delta"] = 0.1
    return option


@pytest.mark.parametrize("name", [*export_recipe.OPTIONS, *OTHERS])
@pytest.mark.parametrize("noise", [0.003, 0.3, 4.0])
def test_factors_equal_those_of_the_package_bitwise(name: str, noise: float, exported: Path) -> None:
    option = {"weight": None, "masks": {}} | read_option(name)
    draw = torch.Generator().manual_seed(len(name))
    old = -torch.rand(64, 23, generator=draw) * 5
    mu, pi = (old + noise * torch.randn(64, 23, generator=draw) for _ in range(2))
    lengths = torch.randint(0, 24, (64, 1), generator=draw)
    mask = torch.arange(23) < lengths
    mask[:, 3] = False  # a tool's token
    advantages = torch.randn(64, 1, generator=draw).expand(64, 23).clone()
    mu[5, 1], old[6, 2], mu[7, 4] = float("-inf"), float("nan"), float("nan")
    spec = CorrectionSpec.from_mapping(option)
    stage = rollout_stage(spec, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    step = step_stage(spec, stage, log_prob=pi, advantages=advantages)
    factor, sums = load("correction").compute_factor(
        load("correction").Correction.from_config(option),
        **dict(old_log_prob=old, rollout_log_prob=mu, log_prob=pi, response_mask=mask, advantages=advantages),
    )
    assert torch.equal(factor, step.weight * step.keep)
    assert 0 < sums["keep"] <= mask.sum()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"wieght": None}, "correction.wieght is unknown"),
        ({"weight": {"level": "turn", "kind": "clip", "lower": 0.5, "upper": 2.0}}, "correction.weight.level=turn"),
        ({"weight": {"level": "token", "kind": "clip", "lower": -1, "upper": 2.0}}, "correction.weight.lower=-1"),
        ({"masks": {"a": {"ratio": "full", "level": "token", "aggregate": "any"}}}, "correction.masks.a has no bound"),
    ],
)
def test_a_bad_correction_is_refused(section: dict[str, Any], message: str, exported: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load("correction").Correction.from_config({"weight": None, "masks": {}} | section)


@pytest.mark.parametrize("part", ["weight", "gsm", "opsm"])
def test_a_lost_part_is_found_although_it_would_not_act(
    part: str, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mu equals pi_old everywhere, so every factor is 1 with and without the part."""
    smoke, check, correction = load("smoke_test"), load("check"), load("correction")
    monkeypatch.setattr(smoke, "LOG_RATIOS", tuple(tuple(0.0 for _ in row) for row in smoke.LOG_RATIOS))
    monkeypatch.setattr(smoke, "KEPT", (1.0,) * len(smoke.LOG_RATIOS))
    assert smoke.run_update() < 1e-5

    class Forgetful(smoke.CorrectedLoss):  # type: ignore[misc,name-defined]
        def compute_factor(self, batch: Any) -> Any:
            kept = self.correction
            masks = {name: mask for name, mask in kept.masks.items() if name != part}
            self.correction = correction.Correction(None if part == "weight" else kept.weight, masks)
            try:
                return super().compute_factor(batch)
            finally:
                self.correction = kept

    with pytest.raises(check.NotLive, match=f"correction.*{part}"):
        smoke.run_update(Forgetful)
