"""Turn-level credit in whole runs, with verl's tool agent and a tool that returns rewards; every recorded advantage is
checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from recipe.offpolicy.recording.recording import Recording
from tests.support.paths import ROOT
from tests.support.tool_turns import judge_token
from tests.support.whole_runs import train

pytestmark = [pytest.mark.slow, pytest.mark.extended]

LENGTH, MOST_TURNS = 32, 3
TOOL = (
    f"tool_config_path={ROOT / 'tests' / 'data' / 'asked_tool.yaml'}"
    if version("verl") == "0.7.1"
    else f"function_tool_path={ROOT / 'tests' / 'support' / 'asked_tool.py'}"
)
TOOLS = (
    f"data.max_response_length={LENGTH}",
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "actor_rollout_ref.rollout.multi_turn.format=asks",
    f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={MOST_TURNS}",
    f"actor_rollout_ref.rollout.multi_turn.{TOOL}",
)
V0_OF_MANY = pytest.param(("trainer.use_v1=false",), id="v0", marks=pytest.mark.verl(">=0.9"))
CREDIT = ("turn_credit.turn_rewards=tool_rewards", "algorithm.gamma=0.5")


def standardise(values: list[float]) -> list[float]:
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    return [(value - mean(values)) / stdev(values) for value in values]


@pytest.mark.parametrize("trainer", [pytest.param((), id="newest trainer"), V0_OF_MANY])
def test_every_advantage_is_that_of_a_loop(
    trainer: tuple[str, ...], run_program: Callable[..., Any], tmp_path: Path
) -> None:
    run = train(
        run_program,
        *TOOLS,
        *trainer,
        "correction=[tis_turn,gsm_turn]",
        "correction.masks.gsm_turn.lower=0.9",
        "correction.masks.gsm_turn.upper=1.1",
        "turn_credit=turn_index",
        *CREDIT,
        "trainer.total_training_steps=2",
        f"offpolicy.record.dir={tmp_path / 'record'}",
        OFFPOLICY_TURNS=str(tmp_path),
        VERL_USE_EXTERNAL_MODULES="verl_patches.cpu,tests.support.tool_turns",
        PYTHONPATH=str(ROOT),
    )
    assert run.returncode == 0, run.output[-3000:]
    assert "turn-level credit LIVE on" in run.log
    for step in run.steps:
        assert step["turn_credit/turns"] > 1.5
        assert step["turn_credit/varied_share"] > 0.2
    assert run.steps[-1]["offpolicy/live/proved"] == run.steps[-1]["offpolicy/live/turn_credit"] == 1.0
    assert count_right_advantages(tmp_path / "record") > 300


def count_right_advantages(directory: Path) -> int:
    """Count the turns of a recording whose advantage equals that of a plain loop; fail at the first that differs."""
    checked = 0
    for recorded in Recording(directory):
        groups: dict[str, list[tuple[list[float], list[set[float]]]]] = defaultdict(list)
        rows = recorded.rows
        for row in range(len(rows)):
            of_row = slice(*rows.offsets[row : row + 2])
            ids, turn, dealt = rows.response_ids[of_row], rows.turn[of_row], rows.advantages[of_row]
            assert not dealt[turn < 0].any()
            count = int(turn.max()) + 1
            # The tool was not called after the third turn, nor by an answer that filled the response.
            calls = count if count < MOST_TURNS and len(ids) < LENGTH else count - 1
            earned = [judge_token(int(ids[turn == k][0])) if k < calls else 0.0 for k in range(count)]
            earned[-1] += float(rows.reward[row])
            for k in range(count - 2, -1, -1):
                earned[k] += 0.5 * earned[k + 1]
            groups[rows.uid[row]].append((earned, [set(dealt[turn == k].tolist()) for k in range(count)]))
        for members in groups.values():
            for k in range(max(len(earned) for earned, _ in members)):
                there = [(earned[k], dealt[k]) for earned, dealt in members if len(earned) > k]
                for value, (_, seen) in zip(standardise([earned for earned, _ in there]), there, strict=True):
                    (advantage,) = seen
                    assert advantage == pytest.approx(value, abs=1e-4)
                    checked += 1
    return checked
