"""The command line: tables, a picture, a page, JSON, and one sentence for what cannot be."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.whatif import whatif_page
from recipe.offpolicy.analysis.whatif.candidates import UNCORRECTED, Candidate, build_candidates
from recipe.offpolicy.analysis.whatif.measures import Agreement, CorrectionMeasures
from recipe.offpolicy.analysis.whatif.study import run_study
from recipe.offpolicy.analysis.whatif.whatif_page import format_heading, shorten_label
from recipe.offpolicy.recording import Recording
from recipe.offpolicy.recording.files import write
from recipe.offpolicy.recording.recording import file_name
from recipe.offpolicy.whatif import main
from tests.support.acted import acted, recorded, varied_rows
from tests.support.corrections import GSM, TIS, band, spec
from tests.support.recordings import NONE, drawn_rows, record

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
    assert 10_000 < len(page) < 5_000_000
    for words in (
        "masks.gsm.upper",
        "tokens kept",
        "nothing lies between",
        "Cosine of the gradient weights",
        "lr scale by step",
    ):
        assert words in page


def test_json_is_the_whole_study(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(directory), *GRID, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["recording"]["steps"] == [5, 6]
    assert found["fidelity"]["agrees"] is True
    assert [one["label"].split(" ")[-1] for one in found["corrections"]] == [
        "uncorrected", "correction.masks.gsm.upper=1.01", "correction.masks.gsm.upper=1.05",
    ]  # fmt: skip
    assert list(found["failures"]) == ["correction=[tis_token,gsm] correction.masks.gsm.upper=0.5"]
    one = found["corrections"][2]
    assert one["point"] == {"correction.masks.gsm.upper": "1.05"}
    assert one["spec"] == spec(TIS, gsm=GSM | {"upper": 1.05}).to_mapping()
    assert (
        set(one["overall"]) == set(one["groups"]["length/le64"]) == {field.name for field in fields(CorrectionMeasures)}
    )
    assert set(one["steps"]) == {"5", "6"}
    assert set(found["agreement"]) == {"labels", *(field.name for field in fields(Agreement))}
    assert found["agreement"]["jaccard_tokens"][0] == [None, 0.0, 0.0]
    read = Recording(directory)
    (again,) = run_study(read, read.steps, build_candidates([["correction=[tis_token,gsm]"]], [], {})).outcomes
    (other,) = run_study(read, read.steps, [Candidate("x", "x", {}, spec(TIS, gsm=GSM))]).outcomes
    assert again.overall == other.overall


def test_what_acted_alone_by_default(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(directory), "--json", "--steps", "6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in found["corrections"]] == ["uncorrected", "recorded"]
    assert found["recording"]["steps"] == [6]
    assert found["corrections"][1]["overall"]["kept_tokens"] < 1


def test_a_recording_that_the_code_disagrees_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, reasons = acted(varied_rows(seed=1), ACTING)
    record(tmp_path, replace(rows, weight=rows.weight * 1.01), spec=ACTING.to_mapping(), reasons=reasons)
    assert main([str(tmp_path)]) == 1
    assert "MISMATCH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--spec", "correction=gsmm"], "no such option. Nearest: 'gsm'"),
        ([*GRID[:2], "--grid", "correction.masks.gsm.uper=1"], "Nearest: 'correction.masks.gsm.upper'"),
        (["--steps", "7:9"], "no step from 7 to 9 is recorded; the recorded steps are 5 to 6"),
        (["--png", "/proc/none/a.png"], "/proc/none"),
        (["--html", "."], "--html .: it is a directory. Name a file, such as --html whatif.html"),
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


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_page_that_cannot_be_written_loses_no_table(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recipe.offpolicy.analysis.page.os.replace", fail)
    for form, words in (("--json", '"schema": 1'), ("--steps=5:", "What each correction would have done")):
        assert main([str(directory), *GRID, form, "--html", str(tmp_path / "a.html")]) == 2
        said = capsys.readouterr()
        assert words in said.out
        assert "No space left on device" in said.err


@pytest.mark.slow  # a process of its own, as of the next
def test_a_reader_who_closes_the_pipe_gets_the_page_all_the_same(tmp_path: Path) -> None:
    directory, page = record(tmp_path / "run", drawn_rows([5, 9])), tmp_path / "a.html"
    command = [sys.executable, "-m", "recipe.offpolicy.whatif", str(directory), "--html", str(page)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")
    assert page.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_beyond_thirty_corrections_no_table_has_a_column_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = recorded(tmp_path / "run", ACTING, *(varied_rows(8, seed=step, step=step) for step in (5, 6)))

    def run(values: int) -> tuple[str, str, str]:
        """30 values and "uncorrected" are 31; one more is no correction and does not count."""
        uppers = [f"1.{value:03d}" for value in range(11, 11 + values)]
        grid = ["--spec", "correction=gsm", "--grid", f"correction.masks.gsm.upper={','.join([*uppers, '0.5'])}"]
        assert main([str(directory), *grid, "--html", str(tmp_path / "a.html")]) == 0
        said = capsys.readouterr()
        return said.err, said.out, (tmp_path / "a.html").read_text()

    _, *written = run(30)
    for text in written:
        assert "31 corrections are more than 30: no tables of their agreement or by step are shown." in text
        assert "Jaccard)" not in text.replace("<dt>in common (Jaccard)", "")
        assert "lr scale by step" not in text
    err, out, page = run(29)
    assert err == ""
    assert "are more than 30" not in out + page
    assert "Jaccard)" in out
    assert "lr scale by step" in page


def test_steps_without_rows_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = drawn_rows([2]).take(np.zeros(0, dtype=np.int64))
    write(tmp_path / file_name(1, 0), empty, NONE, ())
    assert main([str(tmp_path), "--json"]) == 2
    assert capsys.readouterr().err == f"whatif: {tmp_path}: no row is recorded in steps 1 to 1. Record other steps.\n"
    record(tmp_path, drawn_rows([2, 3], step=2))
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recording"] == {
        "directory": str(tmp_path), "steps": [2], "rows": 2, "tokens": 5,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_without_a_valid_token_nothing_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = np.full(5, np.nan, dtype=np.float32)
    record(tmp_path / "none", drawn_rows([2, 3], rollout_log_prob=nan))
    picture = ["--spec", "correction=gsm", "--grid", "correction.masks.gsm.upper=1.01,1.02"]
    assert main([str(tmp_path / "none"), *picture, "--png", str(tmp_path / "a.png")]) == 0
    said = capsys.readouterr().out
    assert "The replay was not compared" in said
    assert "No token has a finite mu and pi_old." in said
    assert main([str(tmp_path / "none"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fidelity"]["agrees"] is None
    # One valid token of five is compared.
    nan[3] = -1.0
    record(tmp_path / "one", drawn_rows([2, 3], rollout_log_prob=nan))
    assert main([str(tmp_path / "one"), "--json"]) == 0
    fidelity = json.loads(capsys.readouterr().out)["fidelity"]
    assert (fidelity["agrees"], fidelity["tokens"]) == (True, 1)


def test_no_valid_point_is_bad_input(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(directory), *GRID[:3], "correction.masks.gsm.upper=0.5,0.6"]) == 2
    assert capsys.readouterr().out.count("nothing lies between") == 2


@pytest.mark.slow
def test_lines_of_the_picture(directory: Path) -> None:
    """One line of panels for each spec and value of the second key, along the key with most values, in its order."""
    read = Recording(directory)
    grid = ["correction.masks.gsm.upper=1.5,1.02,1.1", "correction.weight.upper=2,3"]
    chosen = (Candidate(UNCORRECTED, UNCORRECTED), *build_candidates([["correction=[tis_token,gsm]"]], grid, {}))
    lines = whatif_page.group_into_rows(run_study(read, read.steps, chosen))
    assert [(line.title, line.ticks) for line in lines] == [
        ("[tis_token,gsm] weight.upper=2", ("1.02", "1.1", "1.5")),
        ("[tis_token,gsm] weight.upper=3", ("1.02", "1.1", "1.5")),
    ]
    # Of many values only some are written below the axis, so that they do not run into one another.
    many = f"correction.masks.gsm.upper={','.join(f'1.{value}' for value in range(10, 30))}"
    result = run_study(read, read.steps, [chosen[0], *build_candidates([["correction=gsm"]], [many], {})])
    by_group = whatif_page.draw_study(result).axes[0]
    written = [text.get_text() for text in by_group.get_xticklabels()]
    assert written == ["1.1", "1.13", "1.16", "1.19", "1.22", "1.25", "1.28"]
    assert np.asarray(by_group.get_lines()[0].get_xdata()).shape == (20,)
    # A spec has the keys that it has.
    chosen = (*chosen, *build_candidates([["correction=tis_token"]], grid[1:], {}))
    lines = whatif_page.group_into_rows(run_study(read, read.steps, chosen))
    assert [(line.label, line.ticks) for line in lines][2:] == [("weight.upper", ("2", "3"))]
    plain = (chosen[0], *build_candidates([["correction=gsm"], ["correction=tis_token"]], [], {}))
    result = run_study(read, read.steps, plain)
    assert [(line.ordered, line.ticks) for line in whatif_page.group_into_rows(result)] == [
        (False, ("uncorrected", "gsm", "tis_token"))
    ]
    (drawn_line,) = whatif_page.build_panels(result)
    assert [panel.alt.split(",")[0] for panel in drawn_line][1:3] == [
        "Share kept",
        "Learning-rate scale",
    ]
    panels = whatif_page.draw_study(result).axes
    assert len(panels) == 4
    (kept, *_) = (line for line in panels[1].get_lines() if line.get_label() == "tokens kept")
    drawn = np.asarray(kept.get_xdata(), dtype=float).tolist()
    assert drawn == pytest.approx([outcome.overall.kept_tokens for outcome in result.outcomes])
    assert not any(math.isnan(value) for value in drawn)


def test_help_says_what_a_mask_buys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "The benefit of a mask is shown by the column 'mismatch left', the share of KL(mu, pi)" in said


def test_words() -> None:
    assert (
        shorten_label("correction=[tis_token,gsm] correction.masks.gsm.upper=1.01")
        == "[tis_token,gsm] masks.gsm.upper=1.01"
    )
    groups = ("length/le16", "length/le4096", "length/gt4096", "advantage/negative", "staleness/is1", "turn/ge3")
    assert [format_heading(group) for group in groups] == ["1-16", "1025-4096", "> 4096", "A < 0", "age 1", "turn 3+"]


@pytest.mark.slow
def test_the_program_runs_without_verl_and_ray(tmp_path: Path) -> None:
    record(tmp_path, drawn_rows([5, 9]))
    code = (
        "import sys; from recipe.offpolicy.whatif import main; "
        f"code = main([{str(tmp_path)!r}, '--spec', 'correction=gsm', '--json']); "
        "print({'verl', 'ray', 'matplotlib'} & set(sys.modules), code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "set() 0"
