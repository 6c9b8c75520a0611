"""Tables, figures and pages: what is shown is what was given, escaped, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from recipe.offpolicy.analysis import plotting
from recipe.offpolicy.analysis.page import Code, Details, Page, render_block
from recipe.offpolicy.analysis.plotting import (
    Axis,
    Mark,
    PageError,
    Panel,
    Rule,
    check_target,
    limit_shares,
    serialize,
    style_line,
)
from recipe.offpolicy.analysis.table import (
    Column,
    Table,
    fit_to_width,
    format_cell,
    open_console,
    print_blocks,
    to_rich,
)

HOSTILE = "<script>alert('x')</script>&\"[bold]"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.98765, 3, "0.988"),
        (0.0, 3, "0.000"),
        # Would be shown as 0.000, and is not 0.
        (0.00012, 3, "1.20e-04"),
        (-3.5e7, 3, "-3.50e+07"),
        (0.0005, 3, "0.001"),  # rounds to a digit that is seen
        (12345, 3, "12,345"),
        (np.int64(7), 3, "7"),
        (np.float32(0.5), 2, "0.50"),
        (float("nan"), 3, "-"),
        (None, 3, "-"),
        (float("-inf"), 3, "-inf"),
        (True, 3, "yes"),
        (False, 3, "no"),
        ("gsm", 3, "gsm"),
    ],
)
def test_cells(value: object, digits: int, text: str) -> None:
    assert format_cell(value, digits) == text


def test_numbers_stand_right_and_text_left() -> None:
    table = Table([Column("name"), Column("kept"), Column("forced", align="left")], [["a", 0.5, 1], ["b", None, 2]])
    assert [table.get_alignment(column) for column in range(3)] == ["left", "right", "left"]


def test_rich_shows_brackets_as_text() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(to_rich(Table([Column("correction[bold]"), Column("kept", "%")], [["[gsm,opsm]", 1.0]], "T")))
    text = console.export_text()
    assert "correction[bold]" in text
    assert "[gsm,opsm]" in text
    assert "kept (%)" in text


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


class Reader(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and self.cdata_elem == "script":
            self.scripts.append(data)
        else:
            self.text += data


def a_panel(title: str = HOSTILE, height: float = 3.8) -> Panel:
    marks = [Mark([0, 1, 2], [0.5, math.nan, 1.0], HOSTILE, marker="o"), Rule(0.5, "y", HOSTILE)]
    return Panel(title, HOSTILE, Axis(HOSTILE, ticks={0: HOSTILE}), Axis(HOSTILE, form="percent"), marks, height=height)


def drawn() -> Figure:
    return plotting.draw_panels([a_panel(), a_panel()], columns=2)


def a_page() -> Page:
    page = Page(HOSTILE, "sub")
    table = Table([Column(HOSTILE)], [[HOSTILE]], title=HOSTILE)
    page.add_section(HOSTILE, HOSTILE, Code(HOSTILE), table)
    page.add_section("more", {HOSTILE: HOSTILE}, Details(HOSTILE, [HOSTILE]))
    page.add_section("picture", [a_panel()])
    return page


def test_recorded_text_is_never_markup(tmp_path: Path) -> None:
    assert a_page().write(tmp_path / "deep" / "page.html") == (tmp_path / "deep" / "page.html").stat().st_size
    reader = Reader()
    reader.feed((tmp_path / "deep" / "page.html").read_text())
    assert not {"link", "iframe", "object"} & set(reader.tags)
    assert reader.tags.count("script") == 1 + 3  # of a panel's data, and those that draw it
    content = json.loads(reader.scripts[0])
    assert json.dumps(content).count(json.dumps(HOSTILE)) >= 5
    # Title, heading, navigation, section heading, paragraph, code, caption, column, cell, key, value, summary, inner.
    assert reader.text.count(HOSTILE) == 13


def test_nothing_comes_from_the_network() -> None:
    html = a_page().render()
    reader = Reader()
    reader.feed(html)
    assert reader.sources
    assert all(source.startswith("#") for source in reader.sources)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


def test_the_policy_names_the_scripts_of_panels_and_no_other() -> None:
    html = a_page().render()
    reader = Reader()
    reader.feed(html)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in reader.scripts[1:]]
    assert re.findall("'sha256-([^']*)'", html) == digests
    assert "script-src 'none'" in Page("p").render()


def test_panels_stand_in_rows_in_a_picture() -> None:
    """On a page they stack where a screen is narrow."""
    panels = [a_panel(name, height) for name, height in (("a", 2.0), ("b", 3.0), ("c", 4.0))]
    assert str(render_block(panels)).count('role="img"') == 3
    whole = plotting.draw_panels(panels, columns=2, title="t")
    assert tuple(whole.get_size_inches()) == (2 * plotting.PANEL_WIDTH, 3.0 + 4.0)
    assert [axes.get_title(loc="left") for axes in whole.axes] == ["a", "b", "c"]


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


def test_a_note_stands_where_nothing_is_drawn() -> None:
    panel = Panel("t", "a", Axis(), Axis(), note="nothing to draw")
    (axes,) = plotting.draw_panels([panel]).axes
    assert (axes.texts[0].get_text(), axes.axison) == ("nothing to draw", False)
    assert "nothing to draw" in serialize(panel)


def test_equal_panels_make_equal_pages() -> None:
    assert serialize(a_panel()) == serialize(a_panel())
    assert style_line(1) == {"colour": plotting.PALETTE[1], "dash": "-", "marker": "s"}


def test_an_axis_of_shares_begins_a_little_below_the_least() -> None:
    assert limit_shares(Axis("share"), [Mark([0, 1], [0.83, math.nan])]).limits == pytest.approx((0.8, 1.008))
    assert limit_shares(Axis("share"), []).limits == pytest.approx((0.95, 1.002))


def test_a_legend_lies_below_its_panel() -> None:
    with plotting.apply_style():
        figure, (axes,) = plotting.create_axes()
        axes.plot([0, 1], [0, 1], label="what is drawn " * 12)
        axes.set_xlabel("x")
        plotting.add_legend(axes)
        figure.canvas.draw()
        assert axes.get_window_extent().width > 0.7 * figure.bbox.width
        top = axes.get_legend().get_window_extent().y1
        assert top < axes.get_window_extent().y0
        assert top < axes.xaxis.label.get_window_extent().y0


def test_series_that_are_equal_are_one_line() -> None:
    nan = float("nan")
    series = {"tokens": [1.0, 0.5, nan], "rows": [1.0, 0.6, nan], "ESS": [1.0, 0.5, nan], "left": [1.0, 0.5, 0.1]}
    assert list(plotting.merge_equal_series(series)) == ["tokens, ESS", "rows", "left"]


def test_tables_of_text_are_told_from_tables_of_numbers() -> None:
    text = Table([Column("question"), Column("because")], [["q", "b"]])
    assert 'class="prose"' in render_block(text)
    assert 'class="prose"' not in render_block(Table([Column("question"), Column("share")], [["q", 0.5]]))


@pytest.mark.slow
def test_equal_figures_make_equal_files(tmp_path: Path) -> None:
    for name in ("a.png", "a.svg"):
        plotting.save(drawn(), tmp_path / name)
        first = (tmp_path / name).read_bytes()
        plotting.save(drawn(), tmp_path / name)
        assert (tmp_path / name).read_bytes() == first


def test_the_style_stays_inside() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn()
    assert dict(matplotlib.rcParams) == before
    assert len({tuple(sorted(style_line(index).items())) for index in range(28)}) == 28


def test_text_that_utf8_cannot_say_is_written(tmp_path: Path) -> None:
    """Half of a surrogate pair, as a tokenizer can leave it."""
    page = Page("surrogate")
    page.add_section("text", Code("a\ud800b"))
    page.write(tmp_path / "page.html")
    assert "a?b" in (tmp_path / "page.html").read_text()


def test_empty_blocks_and_sections_are_left_out() -> None:
    page = Page("p")
    page.add_section("none", "", {}, [])
    page.add_section("some", "", "text")
    assert re.findall("<h2>(.*)</h2>", page.render()) == ["some"]
    assert page.render().count("<p>") == 1


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"bokeh", "matplotlib", "jinja2", "rich", "torch"}
    code = f"import sys, recipe.offpolicy.analysis.page; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_blocks_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_blocks(open_console(), Table([Column("a")], [[1]], "T"), "", "word [b] " * 40)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].strip() == "T"
    assert shown[-1] == "word [b] " * 40


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
