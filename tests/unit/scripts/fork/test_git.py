"""Copies next to git: submodules, and what git shows of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.fork.command import DONE, REFUSED
from tests.support.fork_copy import COPIED, MANIFEST, call, commit, copy, git, new_files, put, snapshot


@pytest.fixture
def submodule(fork: Path, tmp_path: Path) -> Path:
    """The fork as verl is: a git repository whose `recipe` is a populated submodule; its path."""
    recipes = put(tmp_path / "recipes", {"dapo/main_dapo.py": "x\n", "README.md": "r\n"})
    git(fork, "submodule", "--quiet", "add", str(commit(recipes)), "recipe")
    commit(fork)
    return fork / "recipe"


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
    assert git(fork, "status", "--porcelain", "-uall") == ""
    if not populated:
        git(fork, "submodule", "--quiet", "update", "--init")
        assert copy(fork) == DONE, "the place stays the same"
        assert "nothing had to be written" in capsys.readouterr().out
        git(fork, "submodule", "--quiet", "deinit", "-f", "recipe")
    assert call(fork, "--undo") == DONE
    assert snapshot(fork) == before
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
        (shadowing_recipe, "recipe/offpolicy/ would be imported instead of"),
        (shadowing_patches, "verl_patches/ would be imported instead of"),
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
