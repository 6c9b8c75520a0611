"""Tables, figures and pages show exactly what was given, escaped, and load nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from recipe.offpolicy.analysis import AnalysisError
from recipe.offpolicy.analysis.page import render_page
from recipe.offpolicy.analysis.plotting import Axis, Mark, Panel, check_target
from recipe.offpolicy.analysis.table import Column, Table, fit_to_width


def test_a_table_is_cut_between_columns_to_fit_a_terminal() -> None:
    """Widths 4, 24 (text may be broken between words), 5 and 10, plus 3 each, plus 1: 56 in total."""
    text = "words " * 10
    columns = [Column("#"), Column("text"), Column("small part"), Column("projection")]
    table = Table(columns, [["#1", text, 0.5, 1234567], ["#222", "", 1.25, 2]], "T")
    assert [[column.header.plain for column in part.columns] for part in fit_to_width(table, 55)] == [
        ["#", "text", "small part"], ["#", "projection"],
    ]  # fmt: skip
    (whole,) = fit_to_width(table, 56)
    assert [column.width for column in whole.columns] == [4, 24, 5, 10]
    for width in (40, 55, 56, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(*fit_to_width(table, width), sep="\n")
        shown_text = console.export_text()
        assert max(map(len, shown_text.splitlines())) <= width
        for word in ("#222", "0.500", "1.250", "1,234,567", "projection", "small"):
            assert word in shown_text


def test_the_policy_names_the_scripts_of_panels_and_no_other() -> None:
    html = render_page("p", {"picture": [[Panel("t", "a", Axis(), Axis(), [Mark([0, 1], [0.5, 1.0], "line")])]]})
    _data, *scripts = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 3
    assert re.findall("'sha256-([^']*)'", html) == digests
    assert "script-src 'none'" in render_page("p", {})


@pytest.mark.parametrize(
    ("name", "example", "said"),
    [
        (".", "out.png", "this is a directory"),
        ("file/below.html", "out.html", "no file can be written under"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(name: str, example: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AnalysisError, match=f"--option.*{said}"):
        check_target("--option", tmp_path / name, example)


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(AnalysisError, match=r"pipe: this is not a regular file\. Name a file, such as --out rep"):
        check_target("--out", pipe, "report.html")
