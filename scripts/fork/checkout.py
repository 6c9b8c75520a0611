"""The verl checkout at a path: its release, and where in it a recipe can live."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_RELEASES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "verl_patches" / "releases.py"))
"""Read as a file: its package needs others, and a copy can be made by any Python."""
SUPPORTED: tuple[str, ...] = _RELEASES["TESTED"]
release_of: Callable[[str], str] = _RELEASES["release_of"]
ALLOW_UNTESTED = "OFFPOLICY_ALLOW_UNTESTED_VERL"
ASIDE = "offpolicy_correction"
"""Folder of the copy in a checkout whose `recipe` is not its own."""


class Refused(Exception):
    """The operation is refused, for a reason in the checkout; nothing was written."""


@dataclass(frozen=True)
class Fork:
    """A verl checkout.

    Attributes:
        root: absolute, links resolved.
        release: that its version stands for.
        place: folder of the copy with a slash, "" for the root.
        reason: why there.
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
        Refused: there is none, its release is none that the recipe was tested with, or Python would not find a copy.
    """
    root = path.resolve()
    if not root.is_dir():
        raise Refused(f"{path}: no such folder. Fix: name the root of a verl checkout.")
    version = root / "verl" / "version" / "version"
    if not (version.is_file() and (root / "verl" / "__init__.py").is_file()):
        inside = (root / "version" / "version").is_file() and (root / "__init__.py").is_file()
        fix = f"name the folder above it, {root.parent}" if inside else "name the root of a verl checkout"
        raise Refused(f"{path} is no verl checkout: it holds no verl/version/version. Fix: {fix}.")
    release = release_of(version.read_text())
    if release not in SUPPORTED and os.environ.get(ALLOW_UNTESTED) != "1":
        raise Refused(
            f"{path} is verl {release}; the recipe was tested with {', '.join(SUPPORTED)}. "
            f"Fix: check one of them out, or set {ALLOW_UNTESTED}=1 to try this one."
        )
    require_repository(root)
    recipe = root / "recipe"
    reason = _why_not_its_own(root, recipe)
    if not reason:
        return Fork(
            root, release, "", "recipe/ is the checkout's own" if recipe.is_dir() else "there is no recipe/ yet"
        )
    if (recipe / "__init__.py").exists():
        raise Refused(
            f"{reason}, and it holds an __init__.py: to Python a `recipe` anywhere else is then invisible, so that "
            f"the copy would have to go inside. Fix: remove recipe/__init__.py there (Python needs none), or unlink "
            f"it (git submodule deinit recipe), and copy again."
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
        raise Refused(f"{root} is no git repository with a commit, and a copy is a commit. Fix: {fix}.")


def _why_not_its_own(root: Path, recipe: Path) -> str:
    """Explain why files below recipe/ would not belong to the checkout; "" where they do."""
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
    return "recipe/ is a git repository of its own" if (recipe / ".git").exists() else ""


def git(root: Path, *arguments: str, given: str = "", **variables: str) -> str:
    """Run git and return its output; "" without output, or where it found nothing.

    Raises:
        Refused: git fails, with its reason.
    """
    # A hook's GIT_DIR would make git answer for another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {"LC_ALL": "C"}
    settings = ("-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null")
    command = ["git", "--no-optional-locks", *settings, "-C", str(root), *arguments]
    try:
        # In a session of its own: an interrupt does not end it half way.
        done = subprocess.run(
            command, input=given, env=environment | variables, capture_output=True, text=True, start_new_session=True
        )
    except FileNotFoundError:
        raise Refused("there is no git in PATH. Fix: install it; a copy is a commit.") from None
    if done.returncode > 1 or (done.returncode and done.stderr):
        raise Refused(f"nothing was written: git {arguments[0]} fails in {root}: {done.stderr.strip()}")
    return done.stdout
