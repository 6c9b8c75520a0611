"""The benchmark of a teacher asks about as many positions as it says, and counts what its processes took."""

from __future__ import annotations

import os

import pytest

from scripts.benchmark.teacher_cost import main, measure
from tests.support.fake_teacher import FakeTeacher, serving


def test_each_repeat_asks_about_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeTeacher()) as teacher:
        cost = measure(teacher.url, rows=20, tokens=8, repeats=2, pid=os.getpid())
        assert [len(row) for row in teacher.asked] == [8] * 60  # two repeats, and one that is not counted
        # The server is a thread of this process here, whose time is the client's as well.
        assert cost.client > 0
        assert cost.server is not None
        assert cost.answer > 0
        assert main([teacher.url, "--rows", "2", "--tokens", "4", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.startswith("2 rows of 4 ids; a prompt position: answered in ")
