"""scripts/teacher.sh: the address on which the teacher listens."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.paths import ROOT


def read_hosts(folder: Path, *arguments: str) -> list[str]:
    """Return the values of --host in the server's arguments; the last one counts."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "teacher.sh"), "model", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "VENV": str(folder)}, stdout=subprocess.PIPE, text=True, check=True
    )
    words = done.stdout.splitlines()
    return [words[place + 1] for place, word in enumerate(words) if word == "--host"]


def test_a_teacher_listens_on_loopback_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    assert read_hosts(tmp_path) == ["127.0.0.1"]
    assert read_hosts(tmp_path, "--port", "8200") == ["127.0.0.1"]
    assert read_hosts(tmp_path, "--host", "0.0.0.0")[-1] == "0.0.0.0"
