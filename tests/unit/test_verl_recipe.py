"""Requirements of verl's collection of recipes: a file that names the recipe's verl, and lint."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.paths import ROOT

RULES = ROOT / "tests" / "data" / "verl_recipe_ruff.toml"


@pytest.mark.skipif(not shutil.which("ruff"), reason="needs ruff")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_the_recipe_passes_their_lint(command: list[str]) -> None:
    linted = ["recipe/offpolicy", "verl_patches"]
    ruff = ["ruff", *command, "--no-cache", "--config", str(RULES), *linted]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
