"""Folders, links and manifests on which nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.fork.command import DONE, REFUSED
from tests.support.fork_copy import MANIFEST, call, commit, copy, put, snapshot


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it has no verl/version/version. Fix: name the root of a verl checkout."),
        (
            {"verl/__init__.py": "", "verl/version/version": "0.6.1\n"},
            "is verl 0.6.1; the recipe was tested with 0.7.1",
        ),
        ({"verl/__init__.py": "", "verl/version/version": "0.9.1.dev0"}, "is verl 0.9.1.dev0"),
    ],
)
def test_other_paths_are_refused(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], message: str
) -> None:
    other = put(tmp_path / "other", files)
    other.mkdir(exist_ok=True)
    before = snapshot(other)
    assert copy(other) == REFUSED
    assert message in capsys.readouterr().err
    assert snapshot(other) == before


@pytest.mark.parametrize(("version", "release"), [("0.8.0.dev", "0.8.0"), ("0.9.0", "0.9.0"), ("0.8.0", "0.8.0")])
def test_a_release_is_known_by_what_its_tag_calls_itself(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str], version: str, release: str
) -> None:
    put(fork, {"verl/version/version": f"{version}\n"})
    assert copy(fork) == DONE
    assert f"{fork}: verl {release}\n" in capsys.readouterr().out
    assert json.loads((fork / MANIFEST).read_text())["verl"] == release


def test_an_untested_release_is_opted_into(project: Path, fork: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(fork, {"verl/version/version": "0.8.2\n"})
    assert copy(fork) == REFUSED
    monkeypatch.setenv("OFFPOLICY_ALLOW_UNTESTED_VERL", "1")
    assert copy(fork) == DONE
    monkeypatch.delenv("OFFPOLICY_ALLOW_UNTESTED_VERL")
    put(fork, {"verl/version/version": "0.10.0\n"})
    assert call(fork, "--undo") == DONE, "an undo does not ask for the release"


def test_links_are_not_written_through(
    project: Path, fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = put(tmp_path / "elsewhere", {"keep.py": "x"})
    (fork / "verl_patches").symlink_to(elsewhere)
    put(fork, {"recipe/offpolicy": "a file\n"})
    before = snapshot(fork), snapshot(elsewhere)
    assert copy(fork) == REFUSED
    assert (
        "these exist, and do not belong to a copy:\n    recipe/offpolicy\n    verl_patches\nFix:"
        in capsys.readouterr().err
    )
    commit(fork)
    assert copy(fork) == REFUSED
    assert (snapshot(fork), snapshot(elsewhere)) == before


def test_a_copy_needs_a_commit_to_stand_on(project: Path, fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fork / ".git").rename(fork.parent / "away")
    for arguments in ((fork, "--no-smoke"), (fork, "--undo")):
        assert call(*arguments) == REFUSED
        assert "is not a git repository with a commit" in capsys.readouterr().err


def test_what_git_refuses_is_said(project: Path, fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(fork)
    (fork / ".git" / "index.lock").touch()
    assert copy(fork) == REFUSED
    assert "nothing was written: git merge fails" in capsys.readouterr().err
    assert snapshot(fork) == before


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"format": 2}',
        '{"about": "", "format": 1, "place": "", "files": {"mine.py": {"sha256": "0"}}}',
    ],
)
def test_a_manifest_that_is_not_ours_is_left_alone(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    commit(put(fork, {MANIFEST: content}))
    before = snapshot(fork)
    for arguments in ((fork, "--no-smoke"), (fork, "--undo")):
        assert call(*arguments) == REFUSED
        assert "is not a manifest of this script" in capsys.readouterr().err
    assert snapshot(fork) == before


def test_undo_takes_no_other_option(project: Path, fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy(fork)
    before = snapshot(fork)
    assert call(fork, "--undo", "--force") == REFUSED
    assert snapshot(fork) == before
