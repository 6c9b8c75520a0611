"""Carries out a plan. The manifest goes first and is finished last, so that an interruption leaves nothing unknown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import fork_manifest
from fork_checkout import Refused
from fork_manifest import NAME, NEW, Manifest
from fork_plan import CopyPlan, UndoPlan, obstacle

_COMPILED = frozenset({".pyc", ".nbi", ".nbc"})


def check_writable(root: Path, paths: Iterable[str]) -> None:
    """Whether files can be put at `paths` or removed from there, and the manifest written.

    Raises:
        Refused: a folder takes no writing.
    """
    folders = {_nearest(root, (root / path).parent) for path in (NAME, *paths)}
    effective = os.access in os.supports_effective_ids
    closed = sorted(str(f) for f in folders if not os.access(f, os.W_OK | os.X_OK, effective_ids=effective))
    if closed:
        raise Refused(
            f"nothing was written: no permission to write in {', '.join(closed)}. Fix: chmod, or another user."
        )


def _nearest(root: Path, folder: Path) -> Path:
    while folder != root and not folder.exists():
        folder = folder.parent
    return folder


def copy(root: Path, plan: CopyPlan, earlier: Manifest | None) -> bool:
    """Brings the checkout to what `plan` says.

    Returns:
        Whether anything was written.
    """
    clean_up(root, plan.manifest)
    if earlier == plan.final and not plan.write and not plan.remove:
        return False
    # Before the manifest: after it an edit counts as known, and a second call would replace it.
    for path, kept in plan.overwritten.items():
        (root / path).rename(root / kept)
    fork_manifest.write(root, plan.manifest)
    for file in plan.write:
        target = root / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        fork_manifest.put(target, file.content, executable=file.executable)
    for path in plan.remove:
        _remove(root, path)
    _prune(root, plan.manifest.directories)
    final = plan.final
    fork_manifest.write(root, replace(final, directories=tuple(d for d in final.directories if (root / d).is_dir())))
    return True


def undo(root: Path, plan: UndoPlan, manifest: Manifest) -> None:
    """Removes what `plan` says, then the manifest."""
    clean_up(root, manifest)
    for path in plan.remove:
        _remove(root, path)
    _prune(root, plan.directories)
    fork_manifest.remove(root)


def clean_up(root: Path, manifest: Manifest | None) -> None:
    """Removes files that were being written when an earlier run was interrupted."""
    for path in (NAME, *(manifest.files if manifest else ())):
        if not obstacle(root, f"{path}{NEW}"):
            (root / f"{path}{NEW}").unlink(missing_ok=True)


def _remove(root: Path, path: str) -> None:
    """A file, and what Python and numba compiled from it."""
    target = root / path
    target.unlink(missing_ok=True)
    if target.suffix == ".py":
        cache = target.parent / "__pycache__"
        for compiled in cache.glob(f"{target.stem}.*"):
            if compiled.suffix in _COMPILED:
                compiled.unlink()
        with contextlib.suppress(OSError):
            cache.rmdir()


def _prune(root: Path, directories: Iterable[str]) -> None:
    """Removes those of `directories` that are empty, the deepest first."""
    for path in sorted(directories, key=lambda path: path.count("/"), reverse=True):
        folder = root / path
        if not folder.is_symlink():
            with contextlib.suppress(OSError):
                folder.rmdir()
