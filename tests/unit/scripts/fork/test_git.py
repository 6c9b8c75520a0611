"""Copies beside git: submodules, and what git shows of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.fork.command import DONE, REFUSED
from tests.support.fork_copy import COPIED, MANIFEST, call, copy, git_free, new_files, put, snapshot


def git(root: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    command = ["git", "-C", str(root), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=git_free()).stdout


@pytest.fixture
def submodule(fork: Path, tmp_path: Path) -> Path:
    """The fork as verl is: a git repository whose `recipe` is a populated submodule; its path."""
    recipes = put(tmp_path / "recipes", {"dapo/main_dapo.py": "x\n", "README.md": "r\n"})
    for root in (recipes, fork):
        git(root, "init", "-q")
        if root == fork:
            git(fork, "submodule", "--quiet", "add", str(recipes), "recipe")
        git(root, "add", "-A")
        git(root, "commit", "-qm", "first")
    return fork / "recipe"


def test_a_git_checkout_shows_our_files_and_nothing_else(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(fork, {".gitignore": "deep/\n", "other.py": "a\n"})
    git(fork, "init", "-q")
    git(fork, "add", "-A")
    git(fork, "commit", "-qm", "first")
    put(fork, {"other.py": "changed\n", "new.py": "new\n"})
    before, status = snapshot(fork), git(fork, "status", "--porcelain", "-uall")
    before = snapshot(fork)
    assert copy(fork) == DONE
    assert "git add -f recipe/offpolicy/deep/er.py" in capsys.readouterr().out
    assert set(new_files(fork, before)) == {*COPIED, MANIFEST}
    shown = {*git(fork, "status", "--porcelain", "-uall").splitlines()} - {*status.splitlines()}
    assert {line[3:] for line in shown} == {*COPIED, MANIFEST} - {"recipe/offpolicy/deep/er.py"}
    assert call(fork, "--undo") == DONE
    assert git(fork, "status", "--porcelain", "-uall") == status


@pytest.mark.parametrize("populated", [True, False])
def test_beside_a_submodule(
    project: Path, fork: Path, submodule: Path, capsys: pytest.CaptureFixture[str], populated: bool
) -> None:
    if not populated:
        git(fork, "submodule", "--quiet", "deinit", "-f", "recipe")
        assert not list(submodule.iterdir())
    before = snapshot(fork)
    assert copy(fork) == DONE
    printed = capsys.readouterr().out
    assert f"recipe/ is a git submodule, {'populated' if populated else 'not initialised'}" in printed
    assert f"export PYTHONPATH={fork}/offpolicy_correction:{fork}\n" in printed
    added = {f"offpolicy_correction/{path}" for path in COPIED} | {MANIFEST}
    assert set(new_files(fork, before)) == added
    assert set(git(fork, "status", "--porcelain", "-uall").splitlines()) == {f"?? {p}" for p in added}
    if not populated:
        git(fork, "submodule", "--quiet", "update", "--init")
        assert copy(fork) == DONE, "the place stays the same"
        assert "nothing had to be written" in capsys.readouterr().out
        git(fork, "submodule", "--quiet", "deinit", "-f", "recipe")
    assert call(fork, "--undo") == DONE
    # git itself has changed its own folder since, if the submodule came and went.
    gone = {path: state for path, state in snapshot(fork).items() if not path.startswith(".git/")}
    assert gone == {path: state for path, state in before.items() if not path.startswith(".git/")}
    assert git(fork, "status", "--porcelain", "-uall") == ""


def shadowing_init(fork: Path, submodule: Path) -> None:
    put(submodule, {"__init__.py": ""})


def shadowing_recipe(fork: Path, submodule: Path) -> None:
    put(submodule, {"offpolicy/__init__.py": ""})


def shadowing_patches(fork: Path, submodule: Path) -> None:
    put(fork, {"verl_patches.py": ""})


@pytest.mark.parametrize(
    ("shadow", "message"),
    [
        (shadowing_init, "it holds an __init__.py"),
        (shadowing_recipe, "recipe/offpolicy/ would be imported in the place of"),
        (shadowing_patches, "verl_patches/ would be imported in the place of"),
    ],
)
def test_where_python_would_not_find_the_copy_it_says_so(
    project: Path,
    fork: Path,
    submodule: Path,
    capsys: pytest.CaptureFixture[str],
    shadow: Callable[[Path, Path], None],
    message: str,
) -> None:
    shadow(fork, submodule)
    before = snapshot(fork)
    assert copy(fork) == REFUSED
    assert message in capsys.readouterr().err
    assert snapshot(fork) == before


def link_elsewhere(fork: Path) -> None:
    (fork / "recipe").symlink_to("..")


def own_repository(fork: Path) -> None:
    put(fork, {"recipe/README.md": ""})
    git(fork / "recipe", "init", "-q")


def gitlink_alone(fork: Path) -> None:
    git(fork, "init", "-q")
    git(fork, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},recipe")


def listed_alone(fork: Path) -> None:
    put(fork, {".gitmodules": '[submodule "recipe"]\n\tpath = recipe\n\turl = ../recipes\n'})


@pytest.mark.parametrize("arrange", [link_elsewhere, own_repository, gitlink_alone, listed_alone])
def test_a_recipe_that_is_not_the_checkouts_own(project: Path, fork: Path, arrange: Callable[[Path], None]) -> None:
    arrange(fork)
    before = snapshot(fork)
    assert copy(fork) == DONE
    assert set(new_files(fork, before)) == {*(f"offpolicy_correction/{path}" for path in COPIED), MANIFEST}
    assert call(fork, "--undo") == DONE
    assert snapshot(fork) == before


@pytest.mark.parametrize("path", ["third_party/recipe", "recipes"])
def test_other_submodules_do_not_matter(project: Path, fork: Path, path: str) -> None:
    put(fork, {".gitmodules": f'[submodule "recipe"]\n\tpath = {path}\n\turl = ../recipes\n'})
    before = snapshot(fork)
    assert copy(fork) == DONE
    assert set(new_files(fork, before)) == {*COPIED, MANIFEST}


def test_when_the_place_changes_the_old_copy_has_to_go_first(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed_alone(fork)
    copy(fork)
    (fork / ".gitmodules").unlink()
    before = snapshot(fork)
    assert copy(fork) == REFUSED
    assert "an earlier copy lives in offpolicy_correction" in capsys.readouterr().err
    assert snapshot(fork) == before
