"""The command line: tables, overrides that a launch accepts, JSON, pictures, and one sentence for invalid input."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.analysis.whatif.candidates import compose_correction, initialize_composer
from recipe.offpolicy.calibrate import main
from recipe.offpolicy.correction import CorrectionSpec
from tests.support.recordings import drawn_rows, record

GSM = "correction=[tis_token,gsm]"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two steps of 160 short and long rows, in groups of 4."""
    lengths = np.tile([6, 30, 200, 90], 40)
    return record(
        tmp_path / "run",
        *(
            drawn_rows(lengths, seed=step, step=step, backend=0.05, uid=np.array(uid, dtype=object))
            for step in (1, 2)
            for uid in [[f"{step}/{row // 4}" for row in range(160)]]
        ),
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.mark.slow
def test_overrides_can_be_pasted(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed overrides compose, and a calibration with them keeps at least the target."""
    status, out, _ = run(capsys, recording, "--spec", GSM, "--target-kept", 0.95, "--target-ess", 0.9985)
    assert status == 0
    pasted = shlex.split(out.split("Overrides:")[1])
    assert pasted[0] == "correction=[tis_token,gsm]"
    assert sorted(override.split("=")[0] for override in pasted[1:]) == [
        "correction.masks.gsm.lower",
        "correction.masks.gsm.upper",
        "correction.weight.upper",
    ]
    with initialize_composer():
        spec = CorrectionSpec.from_mapping(compose_correction(pasted))
    assert f"correction.masks.gsm.upper={spec.masks[0][1].upper}" in pasted
    _, out, _ = run(capsys, recording, "--spec", *pasted, "--target-kept", 0.95, "--json")
    again = json.loads(out)["proposals"][0]
    assert 0.95 <= again["reached_now"] < 0.955
    assert again["proposed"]["values"] == {"lower": again["now"]["lower"], "upper": again["now"]["upper"]}


def test_what_is_not_identified_is_not_proposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No row has pi = pi_old, so the status is 1 and the reason is printed; the other mask still gets a bound."""
    rows = drawn_rows([20] * 200, mini_batch=np.ones(200, dtype=np.int32))
    directory = record(tmp_path / "run", rows)
    status, out, _ = run(capsys, directory, "--spec", "correction=[opsm,gsm]", "--target-kept", 0.9)
    assert status == 1
    assert "masks.opsm.delta: no row was recorded at mini_batch 0" in out
    assert "correction.masks.gsm.upper=" in out
    assert "correction.masks.opsm.delta=" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--spec", "correction=gsm", "--target-kept", "1.5"), "--target-kept 1.5"),
        (("--spec", "correction=gms", "--target-kept", "0.9"), "no such option"),
    ],
)
def test_bad_input_is_a_sentence(
    recording: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, recording, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("calibrate: ")
    assert message in err


def test_bounds_that_cannot_act_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With noise of 2 nats per token, more than a tenth of the rows have a mean over one token beyond 2.3 = log 10.

    The doctor calls such a bound NO-OP.
    """
    directory = record(tmp_path / "far", drawn_rows([1] * 400, backend=2.0))
    status, out, _ = run(capsys, directory, "--spec", "correction=gsm", "--target-kept", 0.9)
    assert status == 1
    assert "masks.gsm: not identified: the bound would be " in out
    assert "correction.masks.gsm.upper" not in out
    directory = record(tmp_path / "near", drawn_rows([1] * 400, backend=1.0))
    status, out, _ = run(capsys, directory, "--spec", "correction=gsm", "--target-kept", 0.9)
    assert status == 0
    assert "correction.masks.gsm.upper" in out
