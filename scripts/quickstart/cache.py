"""Where prepared data and model lie: one folder for each version of the code and the packages that make it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
INGREDIENTS = {
    "data": (["task.py"], ["reasoning-gym"]),
    "model": (["task.py", "reward.py", "model.py", "warm_start.py"], ["torch", "transformers", "reasoning-gym"]),
}
"""Part -> the files that make it, settings included, and the packages that they need."""


def folder(cache: Path, part: str) -> Path:
    """Where "data" or "model" of this version lies, once it is made."""
    digest = hashlib.sha256()
    sources, packages = INGREDIENTS[part]
    for name in sources:
        digest.update((HERE / name).read_bytes())
    for package in packages:
        digest.update(f"{package}=={importlib.metadata.version(package)}".encode())
    return cache / f"{part}-{digest.hexdigest()[:12]}"


def known(cache: Path, parts: Sequence[str]) -> dict[str, Path] | None:
    """The folder of each part, or None when one of them is still to be made."""
    folders = {part: folder(cache, part) for part in parts}
    return folders if all(path.exists() for path in folders.values()) else None


def cached(path: Path, build: Callable[[Path], None]) -> bool:
    """Makes sure that the folder `path` exists, complete; True when it was there already.

    It is built under another name and renamed, so that an interrupted build leaves nothing that looks whole.
    """
    if path.exists():
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        build(draft)
        draft.chmod(0o755)
        os.rename(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return False
