"""The command line: tables, a picture, a page, JSON, and one sentence for invalid input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.offpolicy.whatif import main
from tests.support.acted import acted, recorded, varied_rows
from tests.support.corrections import TIS, band, spec
from tests.support.recordings import record

ACTING = spec(TIS, gsm=band(0.97, 1.03))
GRID = ["--spec", "correction=[tis_token,gsm]", "--grid", "correction.masks.gsm.upper=1.01,1.05,0.5"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    return recorded(folder, ACTING, varied_rows(seed=1, step=5), varied_rows(40, seed=2, step=6))


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_tables_picture_and_page(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png, html = tmp_path / "a.png", tmp_path / "deep" / "a.html"
    assert main([str(directory), *GRID, "--spec", "recorded", "--png", str(png), "--html", str(html)]) == 0
    said = capsys.readouterr().out
    for words in ("uncorrected", "recorded", "[tis_token,gsm]", "masks.gsm.upper", "mismatch", "17-64", "turn 3+"):
        assert words in said
    assert "nothing lies between" in said
    assert "The replay of the recorded correction agrees with the recording" in said
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    for words in ("masks.gsm.upper", "nothing lies between", "Cosine of the gradient weights", "lr scale by step"):
        assert words in page


def test_a_recording_that_the_code_disagrees_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, reasons = acted(varied_rows(seed=1), ACTING)
    record(tmp_path, replace(rows, weight=rows.weight * 1.01), spec=ACTING.to_mapping(), reasons=reasons)
    assert main([str(tmp_path)]) == 1
    assert "MISMATCH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--spec", "correction=gsmm"], "no such option. Nearest: 'gsm'"),
        (["--png", "a.nonsense"], "a.nonsense: .nonsense is not a picture format"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(directory), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("whatif: ")
    assert said.count("\n") == 1
