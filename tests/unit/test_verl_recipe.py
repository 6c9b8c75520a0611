"""What verl's collection of recipes asks of each: a file that names its verl, and its lint."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.paths import ROOT
from verl_patches.releases import TESTED

RECIPE = ROOT / "recipe" / "offpolicy"
RULES = ROOT / "tests" / "data" / "verl_recipe_ruff.toml"


def test_the_required_verl_is_the_newest_that_is_tested() -> None:
    """Their installer takes the first KEY=VALUE of each key, by MODE, and runs PIP_INSTALL."""
    lines = (RECIPE / "REQUIRED_VERL.txt").read_text().splitlines()
    read = [tuple(line.split("=", 1)) for line in lines if not line.startswith("#")]
    fields = dict(read)
    assert len(fields) == len(read), "a key twice: the second would not be read"
    assert fields["MODE"] == "pinned_tag"
    assert fields["TAG"] == f"v{TESTED[-1]}"
    assert fields["PIP_INSTALL"] == f"pip install verl=={TESTED[-1]}"
    assert fields["UPSTREAM"].endswith("/verl-project/verl.git")
    assert f"verl>={TESTED[0]},<={TESTED[-1]}" in fields["NOTES"]


@pytest.mark.skipif(not shutil.which("ruff"), reason="needs ruff")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_the_recipe_passes_their_lint(command: list[str]) -> None:
    linted = ["recipe/offpolicy", "verl_patches"]
    ruff = ["ruff", *command, "--no-cache", "--config", str(RULES), *linted]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
