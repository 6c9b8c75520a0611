"""A copy that is cut short at any point can be finished or undone."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.fork import copying
from scripts.fork.command import DONE, INTERRUPTED, REFUSED
from tests.support.fork_copy import COPIED, MANIFEST, PROJECT, call, copy, new_files, put, snapshot


class Interruption:
    """Ends the command at the n-th call of a function, before that call has done anything."""

    def __init__(self, module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.function: Callable[..., object] = getattr(module, name)
        self.calls = 0
        self.at = -1
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)

    def arm(self, at: int) -> None:
        self.calls, self.at = 0, at


# What an interruption can come before: the last step of writing a file, the removal of one.
POINTS = [(os, "replace"), (copying, "remove")]
# How often each is reached: the manifest twice and seven files; the update's two manifests and its one changed file.
REACHED = {
    ("copy", "replace"): 9,
    ("copy", "remove"): 0,
    ("update", "replace"): 3,
    ("update", "remove"): 1,
    ("undo", "replace"): 0,
    ("undo", "remove"): 7,
}


def prepare(what: str, project: Path, fork: Path) -> None:
    """The state that the operation `what` starts from, in a checkout without a copy."""
    if what == "update":
        put(project, {"recipe/offpolicy/main.py": "older\n", "recipe/offpolicy/older.py": "older\n"})
    if what != "copy":
        assert copy(fork) == DONE
    if what == "update":
        (project / "recipe/offpolicy/older.py").unlink()
        put(project, PROJECT)


def test_an_edit_is_kept_whatever_interrupts_its_replacement(
    project: Path, fork: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(fork)
    put(fork, {"recipe/offpolicy/main.py": "edited\n"})
    interruption = Interruption(os, "replace", monkeypatch)
    interruption.arm(1)
    assert copy(fork, "--force") == INTERRUPTED
    interruption.arm(0)
    assert copy(fork) == DONE
    assert (fork / "recipe/offpolicy/main.py").read_text() == "one\n"
    assert (fork / "recipe/offpolicy/main.py.orig").read_text() == "edited\n"


@pytest.mark.parametrize(("module", "name"), POINTS, ids=[name for _, name in POINTS])
@pytest.mark.parametrize("then", ["copy", "undo"])
@pytest.mark.parametrize("what", ["copy", "update", "undo"])
def test_an_interruption_at_any_point_can_be_finished_or_undone(
    project: Path, fork: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str, then: str, what: str
) -> None:
    before = snapshot(fork)
    interruption = Interruption(module, name, monkeypatch)
    for at in itertools.count(1):
        prepare(what, project, fork)
        interruption.arm(at)
        status = call(fork, "--undo") if what == "undo" else copy(fork)
        interruption.arm(0)
        if then == "copy" and status == INTERRUPTED:
            assert copy(fork) == DONE
            added = new_files(fork, before)
            manifest = json.loads(added.pop(MANIFEST))
            assert (manifest["state"], set(manifest["files"])) == ("complete", set(COPIED))
            assert added == COPIED
        assert call(fork, "--undo") == DONE
        assert snapshot(fork) == before
        if status == DONE:
            break
        assert status == INTERRUPTED
    assert at - 1 == REACHED[what, name]


def test_an_edit_after_an_interruption_is_still_an_edit(
    project: Path, fork: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interruption = Interruption(os, "replace", monkeypatch)
    interruption.arm(5)
    assert copy(fork) == INTERRUPTED
    interruption.arm(0)
    written = next(path for path in sorted(COPIED) if (fork / path).exists())
    put(fork, {written: "edited\n"})
    assert copy(fork) == REFUSED
    assert (fork / written).read_text() == "edited\n"
