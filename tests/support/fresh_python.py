"""Python in a new process, for code that changes its process permanently.

The process is forked from one that has imported the packages that verl imports, which takes ten times as long as verl
itself; verl and this project are not imported there.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

from tests.support.paths import ROOT

ALLOW_UNTESTED = "OFFPOLICY_ALLOW_UNTESTED_VERL"
"""The variable by which these tests try an unsupported release."""

CPU = {"VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
"""The variables that apply the group cpu when verl is imported."""

_OF_VERL = ["torch.distributed.fsdp", "tensordict", "transformers", "ray", "datasets", "hydra"]
_HANGS = 600.0


def python(code: str, *, path: str = "", bare: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """A function that runs code in a process without any of our settings, except those that are given.

    path: a folder before all others on its path. bare: with nothing imported, for code that checks which modules are.
    """
    dropped = {key for key in os.environ if key.startswith(("VERL_", "OFFPOLICY_"))} - {ALLOW_UNTESTED}
    inherited = {key: value for key, value in os.environ.items() if key not in dropped}
    paths = list(filter(None, (str(ROOT), path, inherited.get("PYTHONPATH"))))
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(paths), **environment}
    if bare:
        command = [sys.executable, "-W", "ignore", "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_OF_VERL)
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        process = context.Process(target=_run, args=(code, environment, paths, [str(each) for each in printed]))
        process.start()
        process.join(_HANGS)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(code, process.exitcode, *(each.read_text() for each in printed))


def _run(code: str, environment: dict[str, str], paths: list[str], printed: list[str]) -> None:
    """Run code as `python -W ignore -c` would, after the process was forked."""
    for number, file in enumerate(printed, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = paths
    sys.argv[:] = ["-c"]
    warnings.simplefilter("ignore")
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))


def ok(code: str, *, path: str = "", bare: bool = False, **environment: str) -> str:
    """Return what the code printed; fail if the process failed."""
    done = python(code, path=path, bare=bare, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
