"""Modules that a tool's output needs, and what is said where one is missing."""

from __future__ import annotations

import sys
from argparse import Namespace

import pytest

from recipe.offpolicy.command_line import list_output_modules
from recipe.offpolicy.process_start import answer_help


def test_modules_by_output() -> None:
    assert list_output_modules(Namespace(json=False)) == ["rich"]
    assert list_output_modules(Namespace(json=True, png="a", html=None)) == ["matplotlib"]
    assert list_output_modules(Namespace(json=True, html="a")) == ["bokeh", "jinja2"]


def test_help_is_answered_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "x"])
    answer_help("Usage.")
    monkeypatch.setattr(sys, "argv", ["report", "x", "-h"])
    with pytest.raises(SystemExit) as caught:
        answer_help("Usage.\n")
    assert not caught.value.code
    assert capsys.readouterr().out == "Usage.\n"
