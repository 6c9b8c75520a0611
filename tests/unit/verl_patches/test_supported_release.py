"""An unsupported release of verl is rejected before anything of it is composed or imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from verl_patches import contract
from verl_patches.contract import ALLOW_UNTESTED, PatchError, demand_release

SUPPORTED = "Supported: 0.7.1, 0.8.0, 0.9.0, 0.9.1."
OPT_IN = f"or set {ALLOW_UNTESTED}=1"


def install(release: str | None, monkeypatch: pytest.MonkeyPatch, *, allow: bool = False) -> None:
    monkeypatch.setattr(contract, "installed_release", lambda distribution: release)
    monkeypatch.setattr(contract, "_metadata_release", lambda distribution: release)
    monkeypatch.setenv(ALLOW_UNTESTED, "1" if allow else "0")


@pytest.mark.parametrize(
    ("release", "nearest", "may_be_tried"),
    [
        ("0.6.1", "0.7.1", False),
        ("0.8.1", "0.8.0", True),
        ("0.10.0.dev", "0.9.1", True),
    ],
)
def test_another_release_is_answered_with_the_supported_ones_and_with_the_nearest(
    release: str, nearest: str, may_be_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(release, monkeypatch)
    with pytest.raises(PatchError) as caught:
        demand_release()
    said = str(caught.value)
    assert said.startswith(f"verl {release} in ")
    assert f"is not supported. {SUPPORTED} Fix: pip install verl=={nearest}" in said
    assert (OPT_IN in said) is may_be_tried
    install(release, monkeypatch, allow=True)
    if may_be_tried:
        assert demand_release() == release
    else:  # it lacks keys that our configuration is composed of
        with pytest.raises(PatchError, match=r"Fix: pip install verl==0\.7\.1\.$"):
            demand_release()


def test_a_supported_release_is_returned_and_no_verl_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("0.7.1", "0.8.0", "0.9.0", "0.9.1"):
        install(release, monkeypatch)
        assert demand_release() == release
    install(None, monkeypatch)
    with pytest.raises(PatchError, match=r"verl is not installed\. Supported: .* Fix: pip install verl==0\.9\.1\."):
        demand_release()


PYTHON = [sys.executable, "-m"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ([*PYTHON, "recipe.offpolicy.main_offpolicy", "--check", "correction=tis_token"], 1),
        ([*PYTHON, "recipe.offpolicy.doctor", "--module", "verl.trainer.main_ppo"], 2),
        (["bash", str(ROOT / "scripts" / "quickstart.sh"), "correction=tis_token"], 2),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else None,
)
def test_every_program_checks_the_release_first(command: list[str], status: int, tmp_path: Path) -> None:
    """The checkout fails when it is imported, and has no configuration to compose."""
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text("0.7.0\n")
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('verl was imported')\n")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "VENV": sys.prefix},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    fix = f"Fix: pip install verl==0.7.1, and remove {tmp_path} from PYTHONPATH."
    assert f"verl 0.7.0 in {tmp_path}/verl is not supported. {SUPPORTED} {fix}" in " ".join(said.split())
