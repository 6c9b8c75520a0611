"""Folders, links and manifests for which nothing is written."""

from __future__ import annotations

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
        "these files exist, and do not belong to a copy:\n    recipe/offpolicy\n    verl_patches\nFix:"
        in capsys.readouterr().err
    )
    commit(fork)
    assert copy(fork) == REFUSED
    assert (snapshot(fork), snapshot(elsewhere)) == before


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
