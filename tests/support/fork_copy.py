"""A small project and a small checkout of verl; files are copied from one to the other."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path

from scripts.fork import command

MANIFEST = ".offpolicy-manifest.json"
PROJECT = {
    "recipe/offpolicy/__init__.py": "",
    "recipe/offpolicy/version.py": 'VERSION = "1.2.3"\n',
    "recipe/offpolicy/main.py": "one\n",
    "recipe/offpolicy/run.sh": "#!/bin/sh\n",
    "recipe/offpolicy/deep/er.py": "two\n",
    "verl_patches/__init__.py": "three\n",
    "configs/base.yaml": "a: 1\n",
    "configs/correction/verl/gsm.yaml": "b: 2\n",
}
COPIED = {
    "recipe/offpolicy/__init__.py": "",
    "recipe/offpolicy/version.py": 'VERSION = "1.2.3"\n',
    "recipe/offpolicy/main.py": "one\n",
    "recipe/offpolicy/run.sh": "#!/bin/sh\n",
    "recipe/offpolicy/deep/er.py": "two\n",
    "recipe/offpolicy/config/base.yaml": "a: 1\n",
    "recipe/offpolicy/config/correction/verl/gsm.yaml": "b: 2\n",
    "verl_patches/__init__.py": "three\n",
}


def put(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def git(root: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    command = ["git", "-C", str(root), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=git_free()).stdout


def commit(root: Path) -> Path:
    """Commit all files; create the repository if there is none."""
    if not (root / ".git").exists():
        git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "state", "--allow-empty")
    return root


def call(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


def copy(fork: Path, *options: str) -> int:
    return call(fork, "--no-smoke", *options)


def snapshot(root: Path) -> dict[str, tuple[int, str]]:
    """Map every path below `root`, except git's own, to its mode and its content or target."""
    found = {}
    for path in root.rglob("*"):
        if path.relative_to(root).parts[0] == ".git":
            continue
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
        found[path.relative_to(root).as_posix()] = (mode, content)
    return found


def new_files(root: Path, before: dict[str, tuple[int, str]]) -> dict[str, str]:
    """Map the paths of files that `before` lacks to their contents; all files of `before` must be unchanged."""
    now = snapshot(root)
    assert {path: now.get(path) for path in before} == before
    added = [root / path for path in now.keys() - before.keys()]
    assert not [path for path in added if path.is_symlink()]
    return {path.relative_to(root).as_posix(): path.read_text() for path in added if path.is_file()}


def git_free() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
