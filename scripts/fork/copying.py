"""Copies files into a verl checkout in one commit, and removes them in another commit.

Uncommitted changes in the checkout are protected by git.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import runpy
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

_RELEASES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "verl_patches" / "releases.py"))
"""The contents of ``releases.py``. It is loaded as a file, because its package needs other packages, but copying must
work with any Python."""
SUPPORTED: tuple[str, ...] = _RELEASES["TESTED"]
release_of: Callable[[str], str] = _RELEASES["release_of"]
ALLOW_UNTESTED = "OFFPOLICY_ALLOW_UNTESTED_VERL"
ASIDE = "offpolicy_correction"
"""Folder for the copy in a checkout whose `recipe` folder is not part of the checkout itself."""
PACKAGES = ("recipe/offpolicy", "verl_patches")
MANIFEST = ".offpolicy-manifest.json"
ABOUT = "Copied by copy_into_fork.sh of verl-offpolicy, which updates these files and removes them with --undo."
FORMAT = 2
_SUFFIXES = frozenset({".py", ".yaml", ".md", ".sh", ".txt", ".typed"})
_COMPILED = frozenset({".pyc", ".nbi", ".nbc"})


class Refused(Exception):
    """The operation is refused because of something in the checkout; nothing was written."""


@dataclass(frozen=True)
class Fork:
    """A verl checkout.

    Attributes:
        root: absolute path with links resolved.
        release: release of verl to which the checkout's version corresponds.
        place: folder of the copy, with a trailing slash; "" for the root.
        reason: why the copy is in this folder.
    """

    root: Path
    release: str
    place: str = ""
    reason: str = ""

    @property
    def python_path(self) -> str:
        """PYTHONPATH under which both the copy and the checkout's verl are found."""
        return os.pathsep.join(([str(self.root / self.place)] if self.place else []) + [str(self.root)])


def open_fork(path: Path) -> Fork:
    """Open the checkout at `path`.

    Raises:
        Refused: there is no checkout, the recipe was not tested with the checkout's release, or Python would not find a
            copy.
    """
    root = path.resolve()
    if not root.is_dir():
        raise Refused(f"{path}: no such folder. Fix: name the root of a verl checkout.")
    version = root / "verl" / "version" / "version"
    if not (version.is_file() and (root / "verl" / "__init__.py").is_file()):
        fix = "name the root of a verl checkout"
        raise Refused(f"{path} is not a verl checkout: it has no verl/version/version. Fix: {fix}.")
    release = release_of(version.read_text())
    if release not in SUPPORTED and os.environ.get(ALLOW_UNTESTED) != "1":
        raise Refused(
            f"{path} is verl {release}; the recipe was tested with {', '.join(SUPPORTED)}. "
            f"Fix: check one of them out, or set {ALLOW_UNTESTED}=1 to try this release."
        )
    require_repository(root)
    recipe = root / "recipe"
    reason = _why_not_its_own(root, recipe)
    if not reason:
        return Fork(root, release, reason="recipe/ is not a submodule, a link or a separate repository")
    if (recipe / "__init__.py").exists():
        raise Refused(
            f"{reason}, and it contains an __init__.py, which hides any other `recipe` from Python, so the copy would "
            "have to go inside. Fix: remove recipe/__init__.py there (Python needs none), or unlink it (git "
            "submodule deinit recipe), and copy again."
        )
    for taken in (recipe / "offpolicy", root / "verl_patches"):
        if (taken / "__init__.py").exists() or taken.with_suffix(".py").exists():
            name = taken.relative_to(root)
            raise Refused(
                f"{reason}, and {name}/ would be imported instead of a copy anywhere else. "
                f"Fix: rename {name}/, or undo the copy that it came from."
            )
    return Fork(root, release, f"{ASIDE}/", reason)


def require_repository(root: Path) -> None:
    """Raise Refused unless `root` is the root of a git repository with a commit."""
    if not (root / ".git").exists() or not git(root, "rev-parse", "--verify", "--quiet", "HEAD"):
        fix = "clone verl, or make it one: git init && git add -A && git commit -m verl"
        raise Refused(f"{root} is not a git repository with a commit, and a copy is a commit. Fix: {fix}.")


def _why_not_its_own(root: Path, recipe: Path) -> str:
    """Explain why files under recipe/ would not be part of the checkout; "" if they would."""
    if recipe.is_symlink():
        return f"recipe/ is a link to {os.readlink(recipe)}"
    if recipe.exists() and not recipe.is_dir():
        return "recipe is a file"
    listed = ""
    if (root / ".gitmodules").is_file():
        listed = git(root, "config", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.path$")
    submodules = {os.path.normpath(line.partition(" ")[2]) for line in listed.splitlines()}
    if "recipe" in submodules or git(root, "ls-files", "--stage", "--", "recipe").startswith("160000 "):
        filled = recipe.is_dir() and any(recipe.iterdir())
        return f"recipe/ is a git submodule, {'populated' if filled else 'not initialised'}"
    return "recipe/ is a separate git repository" if (recipe / ".git").exists() else ""


def git(root: Path, *arguments: str, given: str = "", **variables: str) -> str:
    """Run git and return its output; "" if git printed or found nothing.

    Raises:
        Refused: git fails; the message contains git's reason.
    """
    # A hook's GIT_DIR would make git use a different repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {"LC_ALL": "C"}
    settings = ("-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null")
    command = ["git", "--no-optional-locks", *settings, "-C", str(root), *arguments]
    try:
        # git runs in its own process session, so that an interrupt does not end it halfway.
        done = subprocess.run(
            command, input=given, env=environment | variables, capture_output=True, text=True, start_new_session=True
        )
    except FileNotFoundError:
        raise Refused("there is no git in PATH. Fix: install it; a copy is a commit.") from None
    if done.returncode > 1 or (done.returncode and done.stderr):
        raise Refused(f"nothing was written: git {arguments[0]} fails in {root}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Plan:
    """A commit that has not been made yet.

    Attributes:
        message: message of the commit.
        manifest: the manifest that the commit adds; None if the commit removes the existing manifest.
        write: path in the checkout -> the file that is copied to this path, for files that change.
        remove: copied files that are no longer wanted.
        edited: copied files that were edited. An update replaces them, and the edits remain in git's history; an undo
            leaves these files in place.
    """

    message: str
    manifest: dict[str, Any] | None = None
    write: dict[str, Path] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)


def find_shipped(source: Path) -> dict[str, Path]:
    """Find all files to copy, by path; for `recipe/offpolicy/config`, the link is followed."""
    files = {}
    for package in PACKAGES:
        for folder, folders, names in os.walk(source / package, followlinks=True):
            folders[:] = [name for name in folders if name not in ("__pycache__", "outputs") and name[0] != "."]
            for path in (Path(folder, name) for name in names if name[0] != "." and Path(name).suffix in _SUFFIXES):
                files[path.relative_to(source).as_posix()] = path
    return dict(sorted(files.items()))


def read_origin(source: Path) -> tuple[str, str | None]:
    """Read this project's version and commit; the commit ends in "-modified" if there are uncommitted changes."""
    version = str(runpy.run_path(str(source / "recipe/offpolicy/version.py"))["VERSION"])
    if not (source / ".git").exists() or not (head := git(source, "rev-parse", "--verify", "--quiet", "HEAD").strip()):
        return version, None
    return version, head + "-modified" * bool(git(source, "status", "--porcelain", "--", *PACKAGES, "configs"))


def plan_copy(fork: Fork, source: Path, *, force: bool = False) -> Plan:
    """Plan to make a copy, or to update an earlier one.

    Raises:
        Refused: a user's file is in the way, a copied file was edited (without `force`) or has uncommitted changes, or
            an earlier copy is in another place; the message lists them.
    """
    root, earlier, place = fork.root, read_manifest(fork.root), fork.place.rstrip("/")
    if earlier and earlier["place"] != place:
        raise Refused(
            f"an earlier copy is in {earlier['place'] or 'the root'} and now belongs in "
            f"{place or 'the root'}: {fork.reason}. Fix: --undo first, then copy again."
        )
    known, head = (earlier or {"files": {}})["files"], list_blobs(root)
    shipped = {fork.place + path: file for path, file in find_shipped(source).items()}
    wanted = dict(zip(shipped, hash_files(root, shipped.values()), strict=True))
    untracked = [path for path in wanted if path not in head and os.path.lexists(root / path)]
    above = {str(folder) for path in wanted for folder in PurePosixPath(path).parents[:-1]}
    untracked += [path for path in above if (root / path).is_symlink() or (root / path).is_file()]
    foreign = [path for path in wanted.keys() & head.keys() - known.keys() if head[path] != wanted[path]]
    if blocked := [*untracked, *foreign]:
        raise Refused(_list("these files exist, and do not belong to a copy", blocked, "rename or remove them"))
    if dirty := find_uncommitted(root, known):
        raise Refused(_list("these have uncommitted changes", dirty, "commit them, or revert them"))
    edited = [path for path in known.keys() & head.keys() if head[path] not in (known[path], wanted.get(path))]
    if replaced := [path for path in edited if path in wanted and not force]:
        fix = "--force, which replaces them; their content stays in git's history"
        raise Refused(_list("these files were edited after they were copied", replaced, fix))
    version, commit = read_origin(source)
    # A file with the same content that was not created by a copy belongs to the user. It has no entry, so an undo keeps
    # it.
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
    """Plan the removal of a copy."""
    known, head = manifest["files"], list_blobs(root)
    edited = {path for path in known.keys() & head.keys() if head[path] != known[path]}
    edited |= {*find_uncommitted(root, known)} & head.keys()
    return Plan("Remove verl-offpolicy", remove=[*(known.keys() & head.keys() - edited), MANIFEST], edited=[*edited])


def apply(root: Path, plan: Plan) -> None:
    """Commit a plan on top of the checked-out commit; git updates the whole work tree, or refuses without any change.

    Raises:
        Refused: git refuses; the message contains git's reason.
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
    """Read the manifest of the last copy that is checked out at `root`; None if there is none.

    Raises:
        Refused: the manifest was not written by this script.
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
    """Compute git's ids of files; with ``write``, also store their content in the repository."""
    given = "".join(f"{file}\n" for file in files)
    return git(root, "hash-object", "--no-filters", *["-w"] * write, "--stdin-paths", given=given).split()


def find_uncommitted(root: Path, paths: Iterable[str]) -> list[str]:
    """Find the paths whose content in the work tree or in the index differs from the commit."""
    changed = {path for path in git(root, "diff", "--name-only", "-z", "HEAD").split("\0") if path}
    return sorted(changed.intersection(paths))


def _find_author(root: Path) -> dict[str, str]:
    """Find the author of the commit: the author configured in git; if there is none, this script."""
    if git(root, "config", "--get", "user.email"):
        return {}
    roles = itertools.product(("AUTHOR", "COMMITTER"), ("NAME", "EMAIL"))
    return {f"GIT_{role}_{part}": "copy_into_fork" for role, part in roles}


def _remove_compiled(root: Path, path: str) -> None:
    """Remove the files that Python and numba compiled from a removed file, and then any empty folders."""
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
