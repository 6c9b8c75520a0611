"""Tables, figures and pages: what is shown is what was given, escaped, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from recipe.offpolicy.analysis import AnalysisError, plotting
from recipe.offpolicy.analysis.page import Code, render_page, write_page
from recipe.offpolicy.analysis.plotting import Axis, Mark, Panel, Rule, check_target
from recipe.offpolicy.analysis.table import Column, Table, fit_to_width, format_cell


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0.000"),
        # Would be shown as 0.000, and is not 0.
        (0.00012, 3, "1.20e-04"),
        (float("nan"), 3, "-"),
        (float("-inf"), 3, "-inf"),
        (True, 3, "yes"),
    ],
)
def test_cells(value: object, digits: int, text: str) -> None:
    assert format_cell(value, digits) == text


def test_a_table_is_cut_between_columns_to_fit_a_terminal() -> None:
    """Widths 4, 24 (text may be broken at words), 5 and 10, each with 3 more, and 1: 56 in all."""
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


def list_marks() -> list[Mark | Rule]:
    return [
        Mark([1, 2, 4], [0.1, 0.2, 0.3], "line", band=([0.0, 0.1, 0.2], [0.2, 0.3, 0.4]), dash="--", marker="o"),
        Mark([1, 2], [0.1, 0.2], "bars", bar=0.5, base=[0.1, 0.1], band=([0.15, 0.2], [0.3, 0.5]), alpha=0.5),
        Mark([1, 2], [0.1, 0.2], "points", dash="", marker="D"),
        Rule(3.0, "x", "at", dash="-"),
        Rule(1.0, "x", "range", end=2.0),
        Rule(0.1, "y", end=0.2),
    ]


def test_both_ways_to_draw_show_every_mark() -> None:
    panel = Panel("t", "a", Axis("x", log=10, limits=(0.5, 5.0)), Axis("y", limits=(0.0, 1.0)), list_marks(), columns=3)
    (axes,) = plotting.draw_panels([panel]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["line", "points", "at", "range", "bars"]
    assert (axes.get_xscale(), axes.get_xlim(), axes.get_ylim()) == ("log", (0.5, 5.0), (0.0, 1.0))
    assert [patch.get_y() + patch.get_height() for patch in axes.patches[:2]] == pytest.approx([0.2, 0.3])
    found = panel.build()
    assert [item.label.value for item in found.legend[0].items] == ["line", "bars", "points", "at", "range"]
    (bars,) = (each for each in found.renderers if type(each.glyph).__name__ == "VBar")
    assert list(bars.data_source.data["top"]) == pytest.approx([0.2, 0.3])
    assert (found.x_range.start, found.x_range.end, type(found.x_scale).__name__) == (0.5, 5.0, "LogScale")
    assert type(found.yaxis[0]).__name__ == "LinearAxis"


def test_series_that_are_equal_are_one_line() -> None:
    nan = float("nan")
    series = {"tokens": [1.0, 0.5, nan], "rows": [1.0, 0.6, nan], "ESS": [1.0, 0.5, nan], "left": [1.0, 0.5, 0.1]}
    assert list(plotting.merge_equal_series(series)) == ["tokens, ESS", "rows", "left"]


def test_text_that_utf8_cannot_say_is_written(tmp_path: Path) -> None:
    """Half of a surrogate pair, as a tokenizer can leave it."""
    write_page(tmp_path / "page.html", "surrogate", {"text": [Code("a\ud800b")]})
    assert "a?b" in (tmp_path / "page.html").read_text()


def test_empty_blocks_and_sections_are_left_out() -> None:
    page = render_page("p", {"none": ["", {}, []], "some": ["", "text"]})
    assert re.findall("<h2>(.*)</h2>", page) == ["some"]
    assert page.count("<p>") == 1


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
