"""Copying into a checkout and back changes none of the user's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.fork.command import DONE, REFUSED
from tests.support.fork_copy import COPIED, MANIFEST, call, commit, copy, git, new_files, put, snapshot


def test_a_copy_holds_plain_files_and_the_undo_leaves_no_trace(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(fork)
    assert copy(fork) == DONE
    printed = capsys.readouterr().out
    added = new_files(fork, before)
    manifest = json.loads(added.pop(MANIFEST))
    assert added == COPIED
    assert (fork / "recipe/offpolicy/run.sh").stat().st_mode & 0o777 == 0o755
    assert manifest["files"] == {path: git(fork, "hash-object", path).strip() for path in COPIED}
    assert (manifest["version"], manifest["commit"]) == ("1.2.3", None)
    assert git(fork, "log", "--format=%s", "-1") == "Copy verl-offpolicy 1.2.3 (unknown commit)\n"
    assert git(fork, "status", "--porcelain") == ""
    assert (manifest["verl"], manifest["place"]) == ("0.9.1", "")
    assert "committed 8 files\n" in printed
    assert f"export PYTHONPATH={fork}\n" in printed
    assert call(fork, "--undo") == DONE
    assert "removed 8 files" in capsys.readouterr().out
    assert snapshot(fork) == before
    assert call(fork, "--undo") == DONE
    assert "nothing to undo" in capsys.readouterr().out


def test_an_update_writes_what_changed_and_removes_what_is_gone(project: Path, fork: Path) -> None:
    before = snapshot(fork)
    copy(fork)
    put(project, {"recipe/offpolicy/main.py": "ONE\n", "recipe/offpolicy/new/file.py": "new\n"})
    (project / "recipe/offpolicy/deep/er.py").unlink()
    assert copy(fork) == DONE
    added = new_files(fork, before)
    manifest = json.loads(added.pop(MANIFEST))
    kept = {path: text for path, text in COPIED.items() if path != "recipe/offpolicy/deep/er.py"}
    assert added == kept | {"recipe/offpolicy/main.py": "ONE\n", "recipe/offpolicy/new/file.py": "new\n"}
    assert manifest["files"].keys() == added.keys()
    assert not (fork / "recipe/offpolicy/deep").exists()
    assert call(fork, "--undo") == DONE
    assert snapshot(fork) == before


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("option", ["", "--force"])
def test_files_of_the_users_are_never_overwritten(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str], option: str, committed: bool
) -> None:
    put(fork, {"verl_patches/__init__.py": "theirs\n", "recipe/offpolicy/main.py": "theirs too\n"})
    if committed:
        commit(fork)
    before = snapshot(fork)
    assert copy(fork, *option.split()) == REFUSED
    said = capsys.readouterr().err
    assert "    recipe/offpolicy/main.py\n    verl_patches/__init__.py\n" in said
    assert "nothing was written" in said
    assert snapshot(fork) == before


def test_an_edit_stops_an_update_unless_it_is_forced(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An uncommitted edit stops the update in any case, because git would not have its content."""
    copy(fork)
    put(fork, {"recipe/offpolicy/main.py": "edited\n"})
    put(project, {"verl_patches/__init__.py": "newer\n"})
    before = snapshot(fork)
    assert copy(fork) == copy(fork, "--force") == REFUSED
    assert "these have uncommitted changes:\n    recipe/offpolicy/main.py\nFix:" in capsys.readouterr().err
    commit(fork)
    assert copy(fork) == REFUSED
    assert "edited after they were copied:\n    recipe/offpolicy/main.py\nFix: --force" in capsys.readouterr().err
    assert copy(fork, "--force", "--dry-run") == DONE
    assert snapshot(fork) == before
    capsys.readouterr()
    assert copy(fork, "--force") == DONE
    assert "recipe/offpolicy/main.py was edited: its content is kept in the previous commit" in capsys.readouterr().out
    assert (fork / "recipe/offpolicy/main.py").read_text() == "one\n"
    assert git(fork, "show", "HEAD^:recipe/offpolicy/main.py") == "edited\n"
    assert (fork / "verl_patches/__init__.py").read_text() == "newer\n"


@pytest.fixture
def submodule(fork: Path, tmp_path: Path) -> Path:
    """A fork as verl is structured: a git repository whose `recipe` is a populated submodule; returns its path."""
    recipes = put(tmp_path / "recipes", {"dapo/main_dapo.py": "x\n", "README.md": "r\n"})
    git(fork, "submodule", "--quiet", "add", str(commit(recipes)), "recipe")
    commit(fork)
    return fork / "recipe"


@pytest.mark.parametrize(
    ("shadow", "message"),
    [
        ("recipe/__init__.py", "it contains an __init__.py"),
        ("recipe/offpolicy/__init__.py", "recipe/offpolicy/ would be imported instead of"),
        ("verl_patches.py", "verl_patches/ would be imported instead of"),
    ],
)
@pytest.mark.usefixtures("project", "submodule")
def test_where_python_would_not_find_the_copy_it_says_so(
    fork: Path, capsys: pytest.CaptureFixture[str], shadow: str, message: str
) -> None:
    put(fork, {shadow: ""})
    before = snapshot(fork)
    assert copy(fork) == REFUSED
    assert message in capsys.readouterr().err
    assert snapshot(fork) == before
