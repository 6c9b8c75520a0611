"""The record that a copy leaves in the checkout: which files and folders are ours, and what they held."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fork_checkout import Refused

NAME = ".offpolicy-manifest.json"
NEW = ".offpolicy-new"
"""Suffix of a file that is being written, next to the one that it replaces."""
_FORMAT = 1
_ABOUT = "Copied by copy_into_fork.sh of verl-offpolicy, which updates these files and removes them with --undo."


@dataclass(frozen=True)
class Entry:
    """One copied file.

    Attributes:
        sha256: of what was copied.
        before: of what an unfinished update replaces; None otherwise.
        found: the file was there with this very content before the first copy, and stays when the copy goes.
    """

    sha256: str
    before: str | None = None
    found: bool = False

    def is_ours(self, sha256: str) -> bool:
        return sha256 in (self.sha256, self.before)


@dataclass(frozen=True)
class Manifest:
    """Paths are relative to the checkout's root, with forward slashes.

    Attributes:
        state: "copying" until every file is in place.
        version, commit: of this project.
        verl: release of the checkout.
        place: folder of the copy, "" for the root.
        directories: those that the copy made.
        files: by path.
    """

    state: Literal["copying", "complete"]
    version: str
    commit: str | None
    verl: str
    place: str
    directories: tuple[str, ...] = ()
    files: dict[str, Entry] = field(default_factory=dict)

    def finished(self, kept: set[str]) -> Manifest:
        """The manifest of a complete copy that holds the files `kept`."""
        files = {path: replace(entry, before=None) for path, entry in self.files.items() if path in kept}
        return replace(self, state="complete", files=files)


def read(root: Path) -> Manifest | None:
    """The manifest of the checkout at `root`; None where there is none.

    Raises:
        Refused: there is one that cannot be trusted.
    """
    path = root / NAME
    if not path.exists() and not path.is_symlink():
        return None
    try:
        if path.is_symlink() or not path.is_file():
            raise ValueError("no plain file")
        return _parsed(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{path} is not a manifest of this script ({type(error).__name__}: {error}). Fix: restore it from git; or "
            f"remove it, after which the copied files count as yours."
        ) from error


def _parsed(content: dict[str, Any]) -> Manifest:
    if content.pop("format") != _FORMAT:
        raise ValueError("another format")
    content.pop("about")
    files = {_inside(path): Entry(**entry) for path, entry in content.pop("files").items()}
    directories = tuple(_inside(path) for path in content.pop("directories"))
    manifest = Manifest(**content, directories=directories, files=files)
    if manifest.state not in ("copying", "complete"):
        raise ValueError(f"state {manifest.state!r}")
    return manifest


def _inside(path: str) -> str:
    """`path`, once it is known to lead nowhere else."""
    parts = path.split("/")
    if not all(parts) or not {".", "..", ".git"}.isdisjoint(parts) or "\\" in path:
        raise ValueError(f"the path {path!r} leads out of the checkout")
    return path


def write(root: Path, manifest: Manifest) -> None:
    """Replaces the manifest in one step."""
    content = {"about": _ABOUT, "format": _FORMAT, **asdict(manifest)}
    content["files"] = {path: _brief(entry) for path, entry in sorted(manifest.files.items())}
    put(root / NAME, (json.dumps(content, indent=1) + "\n").encode())


def _brief(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if value}


def remove(root: Path) -> None:
    (root / NAME).unlink(missing_ok=True)


def put(path: Path, content: bytes, *, executable: bool = False) -> None:
    """Writes a file so that it is there whole or not at all."""
    new = path.with_name(f"{path.name}{NEW}")
    try:
        new.write_bytes(content)
        new.chmod(0o755 if executable else 0o644)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
