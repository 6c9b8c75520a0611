"""The launch, ``--check`` and the doctor accept and reject the same command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.doctor.doctor_command import main
from tests.support.applications import NEEDED
from tests.support.examples import each_nth_by_default
from tests.support.launched import Launcher

pytestmark = [pytest.mark.usefixtures("each_actor_is_probed_once"), pytest.mark.verl(">=0.9")]

GSM = ("correction=gsm", *NEEDED)
ACCEPTED: list[tuple[str, ...]] = [
    (*GSM, "--config-name=offpolicy_trainer"),
    (*GSM, "--config-name", "offpolicy_megatron_trainer"),
    (*GSM, "+trainer.of_mine=a", "trainer.of_mine=b"),
]
REFUSED: list[tuple[str, ...]] = [
    ("correction=gsm", "--config-name=offpolicy_trainer", *NEEDED),
    (*GSM, "--config-name=nowhere"),
    (*GSM, "hydra.run.dir=/proc/nowhere"),
    ("correction=[[gsm]]", *NEEDED),
    ("+algorithm.rollout_corection.rollout_is=token", *NEEDED),
]


@pytest.mark.parametrize(
    "line", each_nth_by_default(2, [(line,) for line in (*ACCEPTED, *REFUSED)]), ids=lambda line: " ".join(line)[:80]
)
def test_three_commands_say_the_same(
    line: tuple[str, ...], launch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = line in ACCEPTED
    check, trains = launch("--check", *line), launch(*line)
    assert (check.status == 0, trains.status == 0) == (accepted, accepted), (check, trains)
    assert (check.trained, len(trains.trained)) == ([], int(accepted))
    assert (main(line) == 0) == accepted, capsys.readouterr().out
    assert "Traceback" not in check.printed + trains.printed
