"""Copying of files into a checkout and back out, by a manifest that lists each file before it is written."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkout import Fork, Refused, git

PACKAGES = ("recipe/offpolicy", "verl_patches")
MANIFEST = ".offpolicy-manifest.json"
NEW = ".offpolicy-new"
"""Suffix of a file that is being written, next to the one that it replaces."""
ABOUT = "Copied by copy_into_fork.sh of verl-offpolicy, which updates these files and removes them with --undo."
_SUFFIXES = frozenset({".py", ".yaml", ".md", ".sh", ".txt", ".typed"})
_COMPILED = frozenset({".pyc", ".nbi", ".nbc"})

Entries = dict[str, dict[str, str]]
"""Path -> "sha256" of what was copied, and "before" of what an unfinished update replaces."""


@dataclass
class Plan:
    """Checked changes, none of which has been made.

    Attributes:
        manifest: that holds in the end; None where nothing is left to know.
        unfinished: that holds until then; None where the manifest stays as it is.
        write: files to write, with mode.
        kept: edited files that `--force` replaces -> the path under which each is kept.
        remove: copied files that are no longer wanted.
        edited: the same, but not as they were copied: they stay, and are the user's.
    """

    manifest: dict[str, Any] | None = None
    unfinished: dict[str, Any] | None = None
    write: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)


def read_shipped(source: Path) -> dict[str, tuple[bytes, int]]:
    """Read content and mode of every file to copy, by path; `recipe/offpolicy/config` is read through its link."""
    files = {}
    for package in PACKAGES:
        for folder, folders, names in os.walk(source / package, followlinks=True):
            folders[:] = [name for name in folders if name not in ("__pycache__", "outputs") and name[0] != "."]
            for path in (Path(folder, name) for name in names if name[0] != "." and Path(name).suffix in _SUFFIXES):
                mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                files[path.relative_to(source).as_posix()] = (path.read_bytes(), mode)
    for needed in (*PACKAGES, "recipe/offpolicy/config"):
        if not any(path.startswith(f"{needed}/") for path in files):
            raise Refused(f"{source / needed} holds nothing to copy. Fix: call the script of a whole checkout.")
    return dict(sorted(files.items()))


def read_origin(source: Path) -> tuple[str, str | None]:
    """Read version and commit of this project; a commit with changes on top ends in "-modified"."""
    version = re.search(r"^\s*version=\"([^\"]+)\"", (source / "setup.py").read_text(), re.M)
    if version is None:
        raise Refused(f"{source}/setup.py states no version. Fix: restore it.")
    if not (source / ".git").exists() or not (head := git(source, "rev-parse", "--verify", "--quiet", "HEAD").strip()):
        return version[1], None
    return version[1], head + "-modified" * bool(git(source, "status", "--porcelain", "--", *PACKAGES, "configs"))


def plan_copy(fork: Fork, source: Path, *, force: bool = False) -> Plan:
    """Plan to copy, or to bring an earlier copy up to date.

    Raises:
        Refused: a file of the user's is in the way, a copied file was edited (without `force`), or an earlier copy
            lives in another place; with the list.
    """
    root, earlier = fork.root, read_manifest(fork.root)
    known: Entries = earlier["files"] if earlier else {}
    if earlier and earlier["place"] != fork.place.rstrip("/"):
        raise Refused(
            f"an earlier copy lives in {earlier['place'] or 'the root'} and now belongs in "
            f"{fork.place.rstrip('/') or 'the root'}: {fork.reason}. Fix: --undo first, then copy again."
        )
    wanted = {fork.place + path: file for path, file in read_shipped(source).items()}
    if blocked := {why for path in wanted if (why := find_obstacle(root, path))}:
        raise Refused(_list("these are in the way", blocked, "move them away, then copy again"))
    plan, final = Plan(), Entries()
    unfinished = Entries()
    foreign: list[str] = []
    edited: list[str] = []
    for path, file in wanted.items():
        there, digest = compute_digest(root / path), hashlib.sha256(file[0]).hexdigest()
        # A file of the same content that no copy has put there is the user's: no entry, so that it stays in an undo.
        if path in known or there is None:
            final[path] = {"sha256": digest}
            unfinished[path] = final[path] | ({"before": there} if there not in (None, digest) else {})
        if there != digest:
            plan.write[path] = file
            if there is not None and there not in known.get(path, {}).values():
                (edited if path in known else foreign).append(path)
    if foreign:
        raise Refused(_list("these exist with other content, and are not of a copy", foreign, "rename or remove them"))
    if edited and not force:
        fix = "--force, which replaces them and keeps each beside itself as FILE.orig"
        raise Refused(_list("these were edited since they were copied", edited, fix))
    plan.kept = {path: _free_name(root, path) for path in edited}
    _plan_removal(root, {path: entry for path, entry in known.items() if path not in wanted}, plan)
    # Files on their way out are known until they are gone, so that an interruption forgets none.
    unfinished.update({path: known[path] for path in plan.remove})
    version, commit = read_origin(source)
    about = {"about": ABOUT, "format": 1, "version": version, "commit": commit, "verl": fork.release}
    about["place"] = fork.place.rstrip("/")
    plan.manifest = about | {"state": "complete", "files": final}
    if plan.write or plan.remove or plan.manifest != earlier:
        plan.unfinished = about | {"state": "copying", "files": unfinished}
    check_writable(root, [*plan.write, *plan.remove])
    return plan


def plan_undo(root: Path, manifest: dict[str, Any]) -> Plan:
    """Plan to remove a copy."""
    plan = Plan(unfinished=manifest)
    _plan_removal(root, manifest["files"], plan)
    check_writable(root, plan.remove)
    return plan


def _plan_removal(root: Path, entries: Entries, plan: Plan) -> None:
    for path, entry in entries.items():
        there = compute_digest(root / path)
        ours = there is None or (there in entry.values() and not find_obstacle(root, path))
        (plan.remove if ours else plan.edited).append(path)


def apply(root: Path, plan: Plan) -> None:
    """Carry a plan out. The manifest goes first and is finished last, so that an interruption forgets nothing."""
    if plan.unfinished is None:
        return
    # Before the manifest: after it an edit counts as known, and a second call would replace it.
    for path, kept in plan.kept.items():
        (root / path).rename(root / kept)
    if plan.manifest is not None:
        put(root / MANIFEST, _to_json(plan.unfinished))
    for path, (content, mode) in plan.write.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        put(root / path, content, mode)
    for path in plan.remove:
        remove(root, path)
    if plan.manifest is None:
        (root / MANIFEST).unlink()
    else:
        put(root / MANIFEST, _to_json(plan.manifest))


def read_manifest(root: Path) -> dict[str, Any] | None:
    """Read the manifest of the checkout at `root`; None where there is none.

    Raises:
        Refused: there is one that cannot be trusted.
    """
    path = root / MANIFEST
    if not os.path.lexists(path):
        return None
    try:
        if path.is_symlink() or not path.is_file():
            raise ValueError("no plain file")
        content: dict[str, Any] = json.loads(path.read_text())
        content.pop("directories", None)  # of an earlier version of this script, which also marked the user's files
        content["files"] = {name: entry for name, entry in content["files"].items() if not entry.pop("found", False)}
        if content["format"] != 1 or not isinstance(content["place"], str):
            raise ValueError("another format")
        for name in content["files"]:
            parts = name.split("/")
            if not all(parts) or not {".", "..", ".git"}.isdisjoint(parts) or "\\" in name:
                raise ValueError(f"the path {name!r} leads out of the checkout")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{path} is not a manifest of this script ({type(error).__name__}: {error}). Fix: restore it from git; or "
            f"remove it, after which the copied files count as yours."
        ) from error
    return content


def check_writable(root: Path, paths: Iterable[str]) -> None:
    """Raise Refused where a folder of `paths` or of the manifest takes no writing."""
    existing = {next(folder for folder in (root / path).parents if folder.is_dir()) for path in (MANIFEST, *paths)}
    effective = os.access in os.supports_effective_ids
    if closed := sorted(str(f) for f in existing if not os.access(f, os.W_OK | os.X_OK, effective_ids=effective)):
        raise Refused(
            f"nothing was written: no permission to write in {', '.join(closed)}. Fix: chmod, or another user."
        )


def compute_digest(path: Path) -> str | None:
    """Compute the SHA-256 of the file at `path`; "" where it is no readable file, None where nothing is."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return "" if path.is_symlink() else None
    except OSError:
        return ""


def find_obstacle(root: Path, path: str) -> str | None:
    """Find what obstructs a plain file in plain folders."""
    for step in itertools.accumulate(path.split("/"), "{}/{}".format):
        there = root / step
        if there.is_symlink():
            return f"{step} (a link)"
        if there.exists() and not (there.is_file() if step == path else there.is_dir()):
            return f"{step} ({'no plain file' if step == path else 'no folder'})"
    return None


def put(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that it is there whole or not at all."""
    new = path.with_name(f"{path.name}{NEW}")
    try:
        new.write_bytes(content)
        new.chmod(mode)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def remove(root: Path, path: str) -> None:
    """Remove a file, what Python and numba compiled from it, and folders that are empty then: git knows none."""
    target = root / path
    if find_obstacle(root, path):
        return
    target.unlink(missing_ok=True)
    target.with_name(f"{target.name}{NEW}").unlink(missing_ok=True)
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*"):
        if target.suffix == ".py" and compiled.suffix in _COMPILED:
            compiled.unlink()
    with contextlib.suppress(OSError):
        (target.parent / "__pycache__").rmdir()
    with contextlib.suppress(OSError):
        for folder in itertools.takewhile(lambda folder: folder != root, target.parents):
            if folder.exists():
                folder.rmdir()


def _free_name(root: Path, path: str) -> str:
    """Return path.orig, or path.orig2 and so on where that is taken."""
    names = (f"{path}.orig{number if number > 1 else ''}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(root / name))


def _to_json(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _list(what: str, paths: Iterable[str], fix: str) -> str:
    listed = "".join(f"    {path}\n" for path in sorted(paths))
    return f"nothing was written: {what}:\n{listed}Fix: {fix}."
