"""The doctor on launch scripts: verl's examples, ours, and scripts that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doctor_answer import Ask
from tests.support.scripts_of_verl import DECOUPLED, MULTI_RS, RLOO

pytest.importorskip("verl")
pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"


def test_verls_examples_in_bypass_mode_are_inert_and_mended(ask: Ask, tmp_path: Path) -> None:
    """verl passes the weights and rejections of bypass mode to a worker only if the worker has the keys itself."""
    expected = {
        RLOO: {"rollout_is": "NO-OP", "bypass_mode": "OK", "loss_type": "NO-OP"},
        MULTI_RS: {"rollout_is": "NO-OP", "rollout_rs": "NO-OP", "bypass_mode": "OK"},
    }
    for source, verdicts in expected.items():
        script = tmp_path / "run.sh"
        script.write_text(source)
        answer = ask("--json", "--script", str(script))
        assert answer.status == 1
        assert answer.verdicts() == {f"rollout_correction.{name}": verdict for name, verdict in verdicts.items()}
        line = source.splitlines().index("python3 -m verl.trainer.main_ppo \\") + 1
        assert answer.json["origin"] == f"{script}, line {line}"
        assert answer.json["module"] == "verl.trainer.main_ppo"
        mended = ask("--json", "--script", str(script), *dict.fromkeys(answer.overrides()))
        assert set(mended.verdicts().values()) == {"OK"}


def test_verls_decoupled_example_is_live(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(DECOUPLED)
    answer = ask("--json", "--script", str(script))
    assert answer.status == 0
    assert answer.verdicts() == {"rollout_correction.rollout_is": "OK", "rollout_correction.rollout_rs": "OK"}
    assert ask("--script", str(script), f"{ROLLOUT}.calculate_log_probs=false").status == 1
