"""Python in a process of its own, for what changes a process for good."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

CPU = {
    "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
}
"""The environment that puts the group cpu in force when verl is imported."""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has no setting of ours but those given."""
    inherited = {key: value for key, value in os.environ.items() if key not in CPU}
    path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def ok(code: str, **environment: str) -> str:
    """What the code printed; fails where the process did."""
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
