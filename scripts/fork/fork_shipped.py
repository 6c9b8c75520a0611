"""What is copied: read from this checkout, links followed, so that a copy holds plain files only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fork_checkout import Refused, git

PACKAGES = ("recipe/offpolicy", "verl_patches")
_SUFFIXES = frozenset({".py", ".yaml", ".md", ".sh", ".txt", ".typed"})
_LEFT_OUT = frozenset({"__pycache__", "outputs"})


@dataclass(frozen=True)
class Shipped:
    """One file.

    Attributes:
        path: relative to the place of the copy, with forward slashes.
        executable: whether it may be run.
    """

    path: str
    content: bytes
    executable: bool

    @property
    def sha256(self) -> str:
        return digest(self.content)


@dataclass(frozen=True)
class Origin:
    """What a copy was made of: this project's version, and its commit where there is one."""

    version: str
    commit: str | None


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def shipped_files(root: Path) -> list[Shipped]:
    """Every file of PACKAGES below `root`, sorted by path; `recipe/offpolicy/config` is read through its link."""
    files = []
    for package in PACKAGES:
        found = [
            Shipped(
                path=f"{package}/{relative}",
                content=(root / package / relative).read_bytes(),
                executable=bool((root / package / relative).stat().st_mode & 0o100),
            )
            for relative in _walk(root / package, "")
        ]
        if not found:
            raise Refused(f"{root / package} holds nothing to copy. Fix: call the script of a whole checkout.")
        files += found
    if not any(file.path.startswith("recipe/offpolicy/config/") for file in files):
        raise Refused(
            f"{root}/recipe/offpolicy/config leads to no configuration. Fix: restore it as a link to configs/."
        )
    return sorted(files, key=lambda file: file.path)


def _walk(folder: Path, prefix: str) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in _LEFT_OUT:
            continue
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.suffix in _SUFFIXES:
            yield f"{prefix}{entry.name}"


def origin(root: Path) -> Origin:
    """Version and commit of the checkout at `root`; a commit with changes on top ends in "-modified"."""
    version = re.search(r"^\s*version=\"([^\"]+)\"", (root / "setup.py").read_text(), re.M)
    if version is None:
        raise Refused(f"{root}/setup.py states no version. Fix: restore it.")
    head = git(root, "rev-parse", "--verify", "--quiet", "HEAD", ends=(0, 1)) if (root / ".git").exists() else None
    if not head:
        return Origin(version[1], None)
    changed = git(root, "status", "--porcelain", "--", *PACKAGES, "configs")
    return Origin(version[1], head.strip() + ("-modified" if changed else ""))
