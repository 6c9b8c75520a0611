"""Programs that a script depends on run only if they just read; they cannot be replaced, and cannot run forever."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from recipe.offpolicy.doctor.bash.interpreter import read_script
from recipe.offpolicy.doctor.bash.programs import is_lookup, run_program
from recipe.offpolicy.doctor.bash.shell_values import Field, Unknown


def word(folder: Path, source: str) -> Field:
    """Return the argument of the last call of `launch` in a script."""
    script = folder / "run.sh"
    script.write_text(source)
    call = [call for call in read_script(script, [], dict(os.environ)).calls if call.words[0] == "launch"][-1]
    return call.words[1]


@pytest.mark.parametrize(
    ("module", "code", "answer"),
    [
        ("pathlib", "import pathlib; print(pathlib.Path('vllm'))", "vllm"),
        ("csv", "import importlib.metadata; print(importlib.metadata.version('pytest'))", pytest.__version__),
        ("alongside", "import importlib.util; print(importlib.util.find_spec('next to'))", "None"),
    ],
)
def test_modules_beside_a_script_are_not_imported(module: str, code: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    source = f'cd "$(dirname "$0")"\nlaunch "$(python3 -c "{code}")"\n'
    assert word(tmp_path, source) == answer
    assert not (tmp_path / "mark").exists()


def test_programs_beside_a_script_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").write_text("#!/bin/sh\necho replaced\n")
    (tmp_path / "cat").chmod(0o755)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    assert word(tmp_path, f'cd {tmp_path}; launch "$(cat <<< given)"\n') == "given"


@pytest.mark.parametrize(
    "looked",
    ["$(cat /dev/zero)", "$(< /dev/zero)", "$(seq 900000)"],
)
def test_what_has_no_end_is_not_known(looked: str, tmp_path: Path) -> None:
    assert isinstance(word(tmp_path, f'launch "{looked}"\n'), Unknown)


def test_a_program_that_waits_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipe.offpolicy.doctor.bash.programs._SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    started = time.monotonic()
    assert run_program(["cat", "pipe"], tmp_path, "") is None
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "code",
    [
        "print('a' * 10**10)",
        "print(f'{1:>1000000000}')",
        "print([1 for a in 'xx' for b in 'xx'])",
        "import importlib.util; importlib.util.find_spec('a.b')",
    ],
)
def test_code_that_does_more_than_ask_is_not_run(code: str) -> None:
    assert not is_lookup(code)


def test_whether_a_module_can_be_imported_is_answered_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_device.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, answer in (("of_a_device", "npu"), ("of_no_device", "gpu")):
        source = f'launch "$(python3 -c "import {module}" 2>/dev/null && echo npu || echo gpu)"\n'
        assert word(tmp_path, source) == answer
    assert not (tmp_path / "mark").exists()
