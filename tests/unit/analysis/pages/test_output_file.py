"""Paths at which no file can be written are refused before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipe.offpolicy.analysis.pages import PageError
from recipe.offpolicy.analysis.pages.plotting import check_target


@pytest.mark.parametrize(
    ("name", "example", "said"),
    [
        ("a.txt", "out.png", "not a picture format"),
        ("a", "out.png", "no suffix"),
        (".", "out.png", "it is a directory"),
        ("file/below.html", "out.html", "no file can be written under"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(name: str, example: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PageError, match=f"--option.*{said}"):
        check_target("--option", tmp_path / name, example)


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(PageError, match=r"pipe: it is not a regular file\. Name a file, such as --out report.html"):
        check_target("--out", pipe, "report.html")
