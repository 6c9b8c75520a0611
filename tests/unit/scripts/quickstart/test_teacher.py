"""The quickstart's teacher: when there is one, and how its start is waited for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts.quickstart import teacher
from scripts.quickstart.options import is_set, needs_teacher
from scripts.quickstart.processes import StageFailed

SERVER = """
import sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("overrides", "taught", "needed"),
    [
        ([], False, False),
        (["opd=advantage"], True, True),
        (["opd=null"], False, False),
        (["opd=loss", "opd.teacher.url=http://there:1"], True, False),
    ],
)
def test_a_teacher_is_started_where_none_is_named(overrides: list[str], taught: bool, needed: bool) -> None:
    assert (is_set("opd", overrides), needs_teacher(overrides)) == (taught, needed)


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> teacher.Teacher:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "teacher.sh").write_text(script.format(python=sys.executable, server=tmp_path / "server.py"))
    monkeypatch.setattr(teacher, "SCRIPT", tmp_path / "teacher.sh")
    return teacher.Teacher(tmp_path / "model", os.environ, tmp_path / "teacher.log", tmp_path)


def test_it_is_waited_for_until_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serves = started(tmp_path, monkeypatch, 'exec {python} {server} "$@"')
    try:
        assert list(serves.wait(lambda: None)) == []
    finally:
        serves.child.process.terminate()
        serves.child.process.wait()


def test_one_that_ends_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StageFailed, match=r"ended with 3, see .*teacher\.log"):
        list(started(tmp_path, monkeypatch, "exit 3").wait(lambda: None))


def test_one_that_never_serves_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "SECONDS", 0.1)
    sleeps = started(tmp_path, monkeypatch, "exec sleep 60")
    try:
        with pytest.raises(StageFailed, match="does not serve within 0 s"):
            list(sleeps.wait(lambda: None))
    finally:
        sleeps.child.process.terminate()
        sleeps.child.process.wait()
