"""Copying of files into a checkout as a commit, and back out as another one; git guards what is not committed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import runpy
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .checkout import Fork, Refused, git

PACKAGES = ("recipe/offpolicy", "verl_patches")
MANIFEST = ".offpolicy-manifest.json"
ABOUT = "Copied by copy_into_fork.sh of verl-offpolicy, which updates these files and removes them with --undo."
FORMAT = 2
_SUFFIXES = frozenset({".py", ".yaml", ".md", ".sh", ".txt", ".typed"})
_COMPILED = frozenset({".pyc", ".nbi", ".nbc"})


@dataclass
class Plan:
    """A commit that has not been made.

    Attributes:
        message: of the commit.
        manifest: that it brings; None: it removes the one that is there.
        write: path in the checkout -> the file that is copied to it, of those that change.
        remove: copied files that are no longer wanted.
        edited: copied files with another content: replaced in an update, which git's history keeps; else they stay.
    """

    message: str
    manifest: dict[str, Any] | None = None
    write: dict[str, Path] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)


def find_shipped(source: Path) -> dict[str, Path]:
    """Find every file to copy, by path; `recipe/offpolicy/config` is read through its link."""
    files = {}
    for package in PACKAGES:
        for folder, folders, names in os.walk(source / package, followlinks=True):
            folders[:] = [name for name in folders if name not in ("__pycache__", "outputs") and name[0] != "."]
            for path in (Path(folder, name) for name in names if name[0] != "." and Path(name).suffix in _SUFFIXES):
                files[path.relative_to(source).as_posix()] = path
    for needed in (*PACKAGES, "recipe/offpolicy/config"):
        if not any(path.startswith(f"{needed}/") for path in files):
            raise Refused(f"{source / needed} holds nothing to copy. Fix: call the script of a whole checkout.")
    return dict(sorted(files.items()))


def read_origin(source: Path) -> tuple[str, str | None]:
    """Read version and commit of this project; a commit with changes on top ends in "-modified"."""
    version = str(runpy.run_path(str(source / "recipe/offpolicy/version.py"))["VERSION"])
    if not (source / ".git").exists() or not (head := git(source, "rev-parse", "--verify", "--quiet", "HEAD").strip()):
        return version, None
    return version, head + "-modified" * bool(git(source, "status", "--porcelain", "--", *PACKAGES, "configs"))


def plan_copy(fork: Fork, source: Path, *, force: bool = False) -> Plan:
    """Plan to copy, or to bring an earlier copy up to date.

    Raises:
        Refused: a file of the user's is in the way, a copied file was edited (without `force`) or has changes that are
            not committed, or an earlier copy lives in another place; with the list.
    """
    root, earlier, place = fork.root, read_manifest(fork.root), fork.place.rstrip("/")
    if earlier and earlier["place"] != place:
        raise Refused(
            f"an earlier copy lives in {earlier['place'] or 'the root'} and now belongs in "
            f"{place or 'the root'}: {fork.reason}. Fix: --undo first, then copy again."
        )
    known, head = (earlier or {"files": {}})["files"], list_blobs(root)
    shipped = {fork.place + path: file for path, file in find_shipped(source).items()}
    wanted = dict(zip(shipped, hash_files(root, shipped.values()), strict=True))
    check_writable(root, [*wanted, *known])
    untracked = [path for path in wanted if path not in head and os.path.lexists(root / path)]
    above = {str(folder) for path in wanted for folder in PurePosixPath(path).parents[:-1]}
    untracked += [path for path in above if (root / path).is_symlink() or (root / path).is_file()]
    foreign = [path for path in wanted.keys() & head.keys() - known.keys() if head[path] != wanted[path]]
    if blocked := [*untracked, *foreign]:
        raise Refused(_list("these exist, and are not of a copy", blocked, "rename or remove them"))
    if dirty := find_uncommitted(root, known):
        raise Refused(_list("these have changes that are not committed", dirty, "commit them, or take them back"))
    edited = [path for path in known.keys() & head.keys() if head[path] not in (known[path], wanted.get(path))]
    if replaced := [path for path in edited if path in wanted and not force]:
        fix = "--force, which replaces them; what they held stays in git's history"
        raise Refused(_list("these were edited since they were copied", replaced, fix))
    version, commit = read_origin(source)
    # A file of the same content that no copy has put there is the user's: no entry, so that it stays in an undo.
    files = {path: blob for path, blob in wanted.items() if path in known or path not in head}
    about = {"about": ABOUT, "format": FORMAT, "version": version, "commit": commit, "verl": fork.release}
    manifest = {**about, "place": place, "files": files}
    return Plan(
        f"Copy verl-offpolicy {version} ({commit or 'unknown commit'})",
        manifest if manifest != earlier else None,
        {path: file for path, file in shipped.items() if head.get(path) != wanted[path]},
        [path for path in known.keys() & head.keys() - wanted.keys() if path not in edited],
        edited,
    )


def plan_undo(root: Path, manifest: Mapping[str, Any]) -> Plan:
    """Plan to remove a copy."""
    known, head = manifest["files"], list_blobs(root)
    edited = {path for path in known.keys() & head.keys() if head[path] != known[path]}
    edited |= {*find_uncommitted(root, known)} & head.keys()
    plan = Plan("Remove verl-offpolicy", remove=[*(known.keys() & head.keys() - edited), MANIFEST], edited=[*edited])
    check_writable(root, plan.remove)
    return plan


def apply(root: Path, plan: Plan) -> None:
    """Commit a plan on top of what is checked out; git updates the work tree at once, or refuses and leaves all alone.

    Raises:
        Refused: git's reason.
    """
    if not (plan.write or plan.remove or plan.manifest):
        return
    lines = [f"0 {'0' * 40}\t{path}" for path in plan.remove]
    for (path, file), blob in zip(plan.write.items(), hash_files(root, plan.write.values(), write=True), strict=True):
        lines.append(f"{'100755' if file.stat().st_mode & 0o100 else '100644'} {blob}\t{path}")
    with tempfile.TemporaryDirectory() as scratch:
        if plan.manifest is not None:
            written = Path(scratch, "manifest")
            written.write_text(json.dumps(plan.manifest, indent=1) + "\n")
            lines.append(f"100644 {hash_files(root, [written], write=True)[0]}\t{MANIFEST}")
        index = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        git(root, "read-tree", "HEAD", **index)
        git(root, "update-index", "-z", "--index-info", given="".join(f"{line}\0" for line in lines), **index)
        tree = git(root, "write-tree", **index).strip()
    commit = git(root, "commit-tree", tree, "-p", "HEAD", "-m", plan.message, **_find_author(root)).strip()
    git(root, "merge", "--quiet", "--ff-only", commit)
    for path in plan.remove:
        _remove_compiled(root, path)


def read_manifest(root: Path) -> dict[str, Any] | None:
    """Read the manifest of the last copy that is checked out at `root`; None where there is none.

    Raises:
        Refused: there is one that is not of this script.
    """
    text = git(root, "show", f"HEAD:{MANIFEST}") if MANIFEST in list_blobs(root) else None
    if text is None and not os.path.lexists(root / MANIFEST):
        return None
    try:
        content: dict[str, Any] = json.loads(text or "")
        if content["format"] == FORMAT and isinstance(content["place"], str) and all(content["files"].values()):
            return content
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise Refused(
        f"{root / MANIFEST} is not a manifest of this script. Fix: restore it from git; or remove it and commit that, "
        "after which the copied files count as yours."
    )


def list_blobs(root: Path) -> dict[str, str]:
    """List what is checked out: path -> git's id of its content."""
    lines = git(root, "ls-tree", "-r", "-z", "HEAD").split("\0")
    return {path: entry.split()[2] for entry, _, path in (line.partition("\t") for line in lines if line)}


def hash_files(root: Path, files: Iterable[Path], *, write: bool = False) -> list[str]:
    """Compute git's ids of files; ``write``: and keep their content in the repository."""
    given = "".join(f"{file}\n" for file in files)
    return git(root, "hash-object", "--no-filters", *["-w"] * write, "--stdin-paths", given=given).split()


def find_uncommitted(root: Path, paths: Iterable[str]) -> list[str]:
    """Find the paths whose content in work tree or index is not what is committed."""
    changed = {path for path in git(root, "diff", "--name-only", "-z", "HEAD").split("\0") if path}
    return sorted(changed.intersection(paths))


def check_writable(root: Path, paths: Iterable[str]) -> None:
    """Raise Refused where a folder of `paths` or of the manifest takes no writing."""
    existing = {next(folder for folder in (root / path).parents if folder.is_dir()) for path in (MANIFEST, *paths)}
    effective = os.access in os.supports_effective_ids
    if closed := sorted(str(f) for f in existing if not os.access(f, os.W_OK | os.X_OK, effective_ids=effective)):
        raise Refused(
            f"nothing was written: no permission to write in {', '.join(closed)}. Fix: chmod, or another user."
        )


def _find_author(root: Path) -> dict[str, str]:
    """Find who commits: whom git knows, else this script."""
    if git(root, "config", "--get", "user.email"):
        return {}
    roles = itertools.product(("AUTHOR", "COMMITTER"), ("NAME", "EMAIL"))
    return {f"GIT_{role}_{part}": "copy_into_fork" for role, part in roles}


def _remove_compiled(root: Path, path: str) -> None:
    """Remove what Python and numba compiled from a removed file, and folders that are empty then."""
    target = root / path
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*"):
        if target.suffix == ".py" and compiled.suffix in _COMPILED:
            compiled.unlink()
    with contextlib.suppress(OSError):
        for folder in (target.parent / "__pycache__", *itertools.takewhile(lambda up: up != root, target.parents)):
            if folder.exists():
                folder.rmdir()


def _list(what: str, paths: Iterable[str], fix: str) -> str:
    listed = "".join(f"    {path}\n" for path in sorted(paths))
    return f"nothing was written: {what}:\n{listed}Fix: {fix}."
