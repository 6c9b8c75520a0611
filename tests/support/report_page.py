"""A small recording, its report, and the content of the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from recipe.offpolicy.report import main
from tests.support.recordings import drawn_rows, record


class Tags(HTMLParser):
    """All tags and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def made(tmp_path: Path, steps: int = 4, *, card: Any = None, proof: Any = None, **columns: Any) -> Path:
    """An uncorrected recording of rows of two lengths, in groups of 4."""
    lengths = np.tile([8, 40], 12)
    directory = tmp_path / "run"
    for step in range(1, steps + 1):
        uid = np.array([f"{step}/{row // 4}" for row in range(24)], dtype=object)
        record(directory, drawn_rows(lengths, seed=step, step=step, backend=0.03, uid=uid, **columns))
    for name, content in (("run.json", card), ("proof.json", proof)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return directory


def report(directory: Path, tmp_path: Path, *arguments: str) -> tuple[str, Tags]:
    """Return the report on a recording: its text and its tags."""
    out = tmp_path / "out" / "report.html"
    assert main([str(directory), "--out", str(out), *arguments]) == 0
    text = out.read_text()
    assert len(text.encode()) < 5_000_000  # small enough to be sent
    return text, Tags(text)
