"""scripts/install_cpu.sh rejects an environment of another checkout, and leaves it unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def make_checkout(folder: Path) -> Path:
    for name in ("scripts", "requirements"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install_cpu.sh", folder / "scripts")
    for name in ("requirements/cpu.txt", "requirements/verl-0.9.1.txt", "setup.py"):
        (folder / name).touch()
    return folder


def make_environment(folder: Path, checkout: Path | None) -> Path:
    """Create an environment whose Python is too old, with the editable installation of a checkout."""
    info = folder / "lib" / "python3.11" / "site-packages" / "verl_offpolicy-0.1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").touch()
    (folder / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (folder / "bin" / "python").chmod(0o755)
    if checkout is not None:
        (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": checkout.as_uri()}))
    return folder


def list_files(folder: Path) -> list[tuple[str, int, int]]:
    found = sorted(folder.rglob("*"))
    return [(str(each.relative_to(folder)), each.stat().st_mtime_ns, each.stat().st_size) for each in found]


def install(checkout: Path, *arguments: str) -> tuple[int, str]:
    command = ["bash", str(checkout / "scripts" / "install_cpu.sh"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "TORCH_INDEX")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("how", ["a link", "an installation", "a link to somebody's environment"])
def test_an_environment_of_another_checkout_is_refused(how: str, tmp_path: Path) -> None:
    here, other = make_checkout(tmp_path / "here"), make_checkout(tmp_path / "the other")
    if how == "an installation":
        environment = make_environment(here / ".venv", other)
    else:
        environment = make_environment(other / ".venv", other if how == "a link" else None)
        (here / ".venv").symlink_to(environment)
    before = list_files(environment)
    status, said = install(here)
    assert status == 1
    assert str(other) in said
    assert "is not changed" in said
    assert f"VENV={here}/.venv bash scripts/quickstart.sh" in said
    assert list_files(environment) == before


@pytest.mark.parametrize("how", ["its own", "of a checkout that is gone", "linked to a place of its own"])
def test_an_environment_of_its_own_is_gone_on_with(how: str, tmp_path: Path) -> None:
    here = make_checkout(tmp_path / "here")
    folder = tmp_path / "large disk" if how.startswith("linked") else here / ".venv"
    make_environment(folder, tmp_path / "gone" if "gone" in how else here)
    if how.startswith("linked"):
        (here / ".venv").symlink_to(folder)
    status, said = install(here)
    assert (status, "was made with a Python other than" in said) == (1, True)


def test_a_folder_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    status, said = install(make_checkout(tmp_path / "checkout"), str(ROOT / "tests"))
    assert (status, "not a virtual environment" in said) == (1, True), said
