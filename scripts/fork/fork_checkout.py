"""What a path is: a verl checkout or not, of which release, and where in it a recipe can live."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
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
    """Something about the checkout forbids the operation; nothing was written."""


@dataclass(frozen=True)
class Checkout:
    """A verl source tree.

    Attributes:
        root: absolute, links resolved.
        release: that its version stands for.
    """

    root: Path
    release: str


@dataclass(frozen=True)
class Place:
    """Where the copy lives.

    Attributes:
        folder: relative to the checkout's root, which is "".
        reason: why there.
    """

    folder: str
    reason: str

    def within(self, path: str) -> str:
        """The checkout's own path of a shipped file."""
        return f"{self.folder}/{path}" if self.folder else path

    def python_path(self, root: Path) -> str:
        """PYTHONPATH under which both the copy and the checkout's verl are found."""
        return os.pathsep.join(([str(root / self.folder)] if self.folder else []) + [str(root)])


def open_checkout(path: Path) -> Checkout:
    """The checkout at `path`.

    Raises:
        Refused: there is none, or its release is none that the recipe was tested with.
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
    return Checkout(root, release)


def choose_place(root: Path) -> Place:
    """The root, unless what is written to recipe/ would not be the checkout's own.

    Raises:
        Refused: no place is left in which Python would find the copy.
    """
    recipe = root / "recipe"
    if not (reason := _not_its_own(root)):
        return Place("", "recipe/ is the checkout's own" if recipe.is_dir() else "there is no recipe/ yet")
    if (recipe / "__init__.py").exists():
        raise Refused(
            f"{reason}, and it holds an __init__.py: to Python a `recipe` anywhere else is then invisible, so that "
            f"the copy would have to go inside. Fix: remove recipe/__init__.py there (Python needs none), or unlink "
            f"it (git submodule deinit recipe), and copy again."
        )
    for taken in (recipe / "offpolicy", root / "verl_patches"):
        if (taken / "__init__.py").exists() or taken.with_suffix(".py").exists():
            raise Refused(
                f"{reason}, and {taken.relative_to(root)}/ would be imported in the place of a copy anywhere else. "
                f"Fix: rename {taken.relative_to(root)}/, or undo the copy that it came from."
            )
    return Place(ASIDE, reason)


def _not_its_own(root: Path) -> str:
    """Why files below recipe/ would not belong to the checkout; "" where they do."""
    recipe = root / "recipe"
    if recipe.is_symlink():
        return f"recipe/ is a link to {os.readlink(recipe)}"
    if recipe.exists() and not recipe.is_dir():
        return "recipe is a file"
    modules = root / ".gitmodules"
    listed = modules.is_file() and re.search(r"^\s*path\s*=\s*\"?(\./)?recipe/?\"?\s*$", modules.read_text(), re.M)
    if listed or _is_gitlink(root, "recipe"):
        filled = recipe.is_dir() and any(recipe.iterdir())
        return f"recipe/ is a git submodule, {'populated' if filled else 'not initialised'}"
    if (recipe / ".git").exists():
        return "recipe/ is a git repository of its own"
    return ""


def _is_gitlink(root: Path, path: str) -> bool:
    listed = git(root, "ls-files", "--stage", "--", path)
    return listed is not None and listed.startswith("160000 ")


def ignored(root: Path, paths: Iterable[str]) -> list[str]:
    """Those of `paths` that git would not take into a commit; none where `root` is not in a repository."""
    listed = git(root, "check-ignore", "--stdin", "-z", given="\0".join(paths), ends=(0, 1))
    return [path for path in (listed or "").split("\0") if path]


def git(root: Path, *arguments: str, given: str = "", ends: tuple[int, ...] = (0,)) -> str | None:
    """What git says, reading only; None where `root` is in no repository or git is not installed.

    Raises:
        Refused: git fails on a repository.
    """
    program = shutil.which("git")
    if program is None:
        return None
    done = subprocess.run(
        [program, "--no-optional-locks", "-c", "safe.directory=*", "-C", str(root), *arguments],
        input=given,
        env=_without_git(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in ends:
        return done.stdout
    if "not a git repository" in done.stderr and not (root / ".git").exists():
        return None
    raise Refused(f"git cannot read {root}: {done.stderr.strip()}")


def _without_git(environment: Mapping[str, str]) -> dict[str, str]:
    # A hook's GIT_DIR would make git answer for another repository.
    return {key: value for key, value in environment.items() if not key.startswith("GIT_")} | {"LC_ALL": "C"}
