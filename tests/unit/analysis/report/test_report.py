"""A report of a recording, also with hostile content, without a proof, and while the run continues."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis import page as page_module
from recipe.offpolicy.analysis.attribution import attribution
from recipe.offpolicy.analysis.attribution.worst_examples import TokenDecoder
from recipe.offpolicy.analysis.page import PANEL
from recipe.offpolicy.analysis.report import report_page as module
from recipe.offpolicy.analysis.report.report_page import follow
from recipe.offpolicy.analysis.report.timeline import build_timeline
from recipe.offpolicy.analysis.report.verdict import (
    Answer,
    Studies,
    build_answers,
    run_studies,
)
from recipe.offpolicy.calibrate import main as calibrate
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording
from recipe.offpolicy.recording.files import write
from recipe.offpolicy.recording.recording import file_name
from recipe.offpolicy.report import main
from tests.support.corrections import GSM
from tests.support.recordings import drawn_rows, record
from tests.support.report_page import Tags, made, report
from tests.support.unscored import EVERY

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"
MASKS = {"masks": {"gsm": GSM}}
SPEC = CorrectionSpec.from_mapping(MASKS)


CARD = {
    "model": f"/models/{HOSTILE}",
    "release": "0.9.1",
    "fingerprint": 7,
    "sampling": {HOSTILE: HOSTILE},
    "config": {"trainer": {"nnodes": 1}, HOSTILE: HOSTILE},
}
PROOF = {
    "sentence": f"weight LIVE in the gradient {HOSTILE}",
    "step": HOSTILE,
    "live": {"proved": 1.0, "fingerprint": 1464144645.0, "gradient_error": 1e-7, HOSTILE: 1.0},
}


SCRIPTS = 3
"""Bokeh, its log level, and the page's own script."""
PICTURES = 4 + 2 + 5 + 2 + 4
"""Panels over time, by length, of the attribution, one per bound, and of other corrections."""


class Tokenizer:
    """A tokenizer in which every token is an attack."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return HOSTILE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tags]:
    """A report with everything that can be recorded, all of it hostile, without rendering pictures."""
    tmp_path = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "serialize", lambda panel: "{}")
        patch.setattr(attribution, "load_decoder", lambda card: (TokenDecoder(Tokenizer()), ""))
        return report(made(tmp_path, card=CARD, proof=PROOF), tmp_path)


def test_every_part_is_there(whole: tuple[str, Tags]) -> None:
    text, page = whole
    for said in (
        "Verdict",
        "Reward and mismatch over time",
        "Kept share by length",
        "Where the mismatch comes from",
        "Calibration",
        "Worst examples",
        "What other corrections would have done",
        "Configuration",
        "weight LIVE in the gradient",
        "Read: all 4 recorded steps (1 to 4).",
        "correction.masks.gsm.upper=",
        "tis_token",
        '"nnodes": 1',
    ):
        assert said in page.text
    assert text.count(PANEL) == PICTURES


def test_nothing_is_loaded_and_nothing_runs(whole: tuple[str, Tags]) -> None:
    text, page = whole
    assert not {"img", "link", "iframe", "object", "embed"} & set(page.tags)
    assert page.tags.count("script") == PICTURES + SCRIPTS
    assert text.count("'sha256-") == SCRIPTS
    sources = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert all(source.startswith("#") for source in sources)
    assert "default-src 'none'" in text


def test_hostile_content_stays_text(whole: tuple[str, Tags]) -> None:
    """Tokens, the model's name, the configuration and the proof are shown as text, without tags or control
    characters.
    """
    text, page = whole
    assert page.text.count("<script>alert(1)</script>") > 10
    assert "onerror" not in [name for name, _ in page.attributes]
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_numbers_of_a_step_by_hand(tmp_path: Path) -> None:
    """Three rows of 2, 1 and 1 tokens; log rho ln 2, 0, 0, and nan; the second row rejected; weights 2, 1, 1, 1.

    Valid tokens: 3. KL = ((2 - 1 - ln 2) + 0 + 0) / 3 = 0.10228. Kept tokens: 2 of 4 response tokens, kept rows 1 of 3.
    ESS: w 2 and 1 kept of 3 valid, 9 / (3 * 5) = 0.6. Reward: 1 and 0 known, 0.5. T: 2 and 1 of rows with a token.
    """
    old = np.array([np.log(2.0), 0.0, 0.0, np.nan], dtype=np.float32) - 1
    rows = drawn_rows(
        [2, 1, 1],
        rollout_log_prob=np.full(4, -1.0, np.float32),
        old_log_prob=old,
        log_prob=old + np.float32(0.1),
        weight=np.array([2, 1, 1, 1], np.float32),
        rejected_by=np.array([0, 0, 1, 0], np.uint32),
        reward=np.array([1.0, 0.0, np.nan], np.float32),
    )
    recording = Recording(record(tmp_path / "run", rows, spec=SPEC.to_mapping(), reasons=["masks.gsm"]))
    timeline = build_timeline(recording)
    (step,) = timeline.steps
    assert step.kl == pytest.approx((1 - np.log(2)) / 3, abs=1e-6)
    assert step.drift == pytest.approx(0.1, abs=1e-6)
    assert step.reward == 0.5
    assert (step.length_right, step.length_wrong) == (rows.length[0], rows.length[1])
    assert (step.kept_tokens, step.kept_rows) == (0.5, pytest.approx(1 / 3))
    assert step.ess == pytest.approx(0.6)
    assert step.nonfinite == 1
    assert timeline.reasons == {"masks.gsm": 0.25}
    (bucket,) = timeline.lengths
    assert (bucket.rows, bucket.kept_rows) == (2, 0.5)


@pytest.mark.parametrize(
    ("ages", "answer", "because"),
    [
        # Fresh: k3 of log rho 0.01, 5.0e-5; stale: of log rho 1, e - 2 = 0.72; of two rows as long, 0.36.
        (
            [0, 3],
            "KL(mu, pi_old) 5e-05 nats per token",
            "With stale rows, which were sampled with older weights, the mean is 0.36.",
        ),
        ([0, 0], "KL(mu, pi_old) 0.36 nats per token", "Mean over 4 response tokens"),
    ],
)
def test_engines_are_judged_by_fresh_rows(tmp_path: Path, ages: list[int], answer: str, because: str) -> None:
    mu = np.full(4, -2, np.float32)
    old = mu + np.array([0.01, 0.01, 1, 1], np.float32)
    version = 8 - np.array(ages)
    rows = drawn_rows(
        [2, 2], step=9, rollout_log_prob=mu, old_log_prob=old, log_prob=old, oldest_version=version,
        newest_version=version,
    )  # fmt: skip
    recording = Recording(record(tmp_path / "run", rows))
    found = build_answers(build_timeline(recording), CorrectionSpec(), {}, Studies(frozenset(), "", "", ""))
    (line,) = (one for one in found if one.question == "Do the engines agree?")
    assert line.answer == answer
    assert because in line.because


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "no recorded step"), (("--spec", "correction=gms"), "no such option")]
)
def test_bad_input_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    directory = made(tmp_path, steps=1) if arguments else tmp_path
    assert main([str(directory), "--out", str(tmp_path / "no.html"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "no.html").exists()


def test_no_response_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    write(directory / file_name(1, 0), drawn_rows([]), SPEC.to_mapping(), ["masks.gsm"])
    assert main([str(directory), "--out", str(tmp_path / "no.html")]) == 2
    assert "no response is recorded" in capsys.readouterr().err
    assert calibrate([str(directory), "--target-kept", "0.9"]) == 2
    assert "no response is recorded" in capsys.readouterr().err


def grow(run: Path) -> Iterator[None]:
    """Add a step, another rank's rows of it, nothing, and a step, then interrupt."""
    record(run, drawn_rows([20] * 8, step=1))
    yield
    record(run, drawn_rows([20] * 4, step=1, rank=1))
    yield
    yield
    record(run, drawn_rows([20] * 8, step=2))
    yield
    raise KeyboardInterrupt


def test_it_is_written_when_rows_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out, said = tmp_path / "run", tmp_path / "page.html", list[str]()
    summarized = []
    plain = module.summarize_steps
    monkeypatch.setattr(module, "summarize_steps", lambda steps: summarized.append(steps.steps) or plain(steps))
    growth = grow(run)
    waits = []

    def wait(seconds: float) -> None:
        waits.append((seconds, out.exists()))
        next(growth)

    with pytest.raises(KeyboardInterrupt):
        follow(run, out, 7, said.append, wait)
    assert said[0].startswith("Waiting for the first step.")
    assert [re.sub(r"[\d,]+ bytes", "N bytes", line) for line in said[1:]] == [
        f"{out}: N bytes. Read: the one recorded step (1 to 1).",
        f"{out}: N bytes. Read: the one recorded step (1 to 1).",
        f"{out}: N bytes. Read: all 2 recorded steps (1 to 2).",
    ]
    assert summarized == [[1], [1], [2]]
    assert waits == [(7, False), (7, True), (7, True), (7, True), (7, True)]
    page = out.read_text()
    assert '<meta http-equiv="refresh" content="7">' in page
    assert "20 responses" in page
    assert "Does the reward rise?" in page
    assert "Where the mismatch comes from" not in page


def said(recording: Recording, proximal: str) -> tuple[Answer, Answer]:
    """Return the sentences about whether the engines agree, and about the sources of the mismatch."""
    spec = CorrectionSpec.from_mapping(EVERY[proximal])
    found = build_answers(build_timeline(recording), spec, {}, run_studies(recording, spec))
    by_question = {answer.question: answer for answer in found}
    return by_question["Do the engines agree?"], by_question["Where does the mismatch come from?"]
