"""Routing replay in whole runs on a CPU, with rows of several ages and conversations with a tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.attribution import attribute
from recipe.offpolicy.recording import Recording
from tests.support.paths import ROOT
from tests.support.whole_runs import INJECTED, train

KEY = "offpolicy/routing"
LIVE = "routing replay R3 LIVE in 4 layers"
R3 = ("model=moe", "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3")

pytestmark = [pytest.mark.verl("==0.9.1"), pytest.mark.slow, pytest.mark.extended]


def test_the_mismatch_falls_and_stays_low(run_program: Callable[..., Any], tmp_path: Path) -> None:
    """Experts are packed again after each synchronisation; otherwise vLLM would sample with the experts of the previous
    step.

    vLLM's routers are rounded, so that the engines choose different experts. Without rounding, this would depend on
    near ties in the weights after a warm start, which differ by processor (docs/routing.md).
    """
    recorded = (f"offpolicy.record.dir={tmp_path / 'recording'}", "offpolicy.record.without_replay=true")
    unchecked = ("offpolicy.delivery.sums=null", "offpolicy.delivery.probe=null")  # the rounding is meant
    steps = "trainer.total_training_steps=4"
    run = train(run_program, *R3, steps, *recorded, *unchecked, **INJECTED, OFFPOLICY_INJECT="routers:0")
    assert run.returncode == 0, run.output[-3000:]
    assert LIVE in run.log
    first, *later = run.steps
    assert first[f"{KEY}/equal_share"] < 0.95
    # Seen were 0.45 to 0.64. The trainer mixes the replayed experts by its own weights, which are not rounded.
    assert first[f"{KEY}/kl_k3"] < 0.8 * first[f"{KEY}/kl_k3_without"]
    assert first[f"{KEY}/gate_gradient"] == 1.0
    assert len(later) == 3
    assert all(step["offpolicy/kl/k3"] < 5 * first["offpolicy/kl/k3"] for step in later)
    # What replay takes away is a part of its own in the attribution of a recording.
    found = attribute(Recording(tmp_path / "recording")).whole
    assert found.kl.routing is not None
    assert found.kl.rollout + found.kl.routing + found.kl.drift == pytest.approx(1.0)
    assert found.replayed_kl is not None
    assert found.intervals["kl.routing"][0] > 0
    assert found.kl.whole > found.replayed_kl


@pytest.mark.parametrize("mode", ["+mode=separate_async_cpu", "trainer.v1.trainer_mode=colocate_async"])
def test_rows_that_are_too_old_keep_the_trainers_routes(mode: str, run_program: Callable[..., Any]) -> None:
    """With eta=2, rows are up to two versions old; rows that are at most one version old are replayed."""
    run = train(
        run_program,
        *R3,
        mode,
        "offpolicy.staleness.eta=2",
        "offpolicy.replay.oldest=1",
        "trainer.total_training_steps=4",
    )
    assert run.returncode == 0, run.output[-3000:]
    assert LIVE in run.log
    assert len(run.steps) == 4
    for step in run.steps:
        assert step["offpolicy/live/proved"] == 1.0
        shares = step[f"{KEY}/replayed_token_share"], step[f"{KEY}/withheld_token_share"]
        # All but the last token of each row, which was sampled and never forwarded.
        assert 0.9 < sum(shares) < 1.0
        ages = {age: step[f"offpolicy/staleness/{age}/token_count"] for age in ("is0", "is1", "is2")}
        assert (shares[1] > 0) == (ages["is2"] > 0)
        assert (shares[0] > 0) == (ages["is0"] + ages["is1"] > 0)
        for age in ("is0", "is1"):
            share = step[f"{KEY}/{age}/equal_share"]
            assert share > 0.8 if ages[age] else share is None
        assert step[f"{KEY}/is2/equal_share"] is None
    assert run.steps[0][f"{KEY}/is0/equal_share"] > 0.9
    assert any(step[f"{KEY}/withheld_token_share"] > 0 for step in run.steps)
    assert any(step[f"{KEY}/is1/equal_share"] is not None for step in run.steps)


def test_a_tool_turn_keeps_the_routes_of_the_turn_before(run_program: Callable[..., Any], tmp_path: Path) -> None:
    """verl's tool agent runs on a real server, whose second turn returns different routes for the first turn's tokens.

    The trainer receives the routes with which each turn was sampled; with other routes, k3 would not be lower than
    without replay.
    """
    run = train(
        run_program,
        *R3,
        "trainer.total_training_steps=2",
        "data.max_response_length=32",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.multi_turn.format=asks",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT / 'tests' / 'support' / 'asked_tool.py'}",
        OFFPOLICY_TURNS=str(tmp_path),
        VERL_USE_EXTERNAL_MODULES="verl_patches.cpu,tests.support.tool_turns",
        PYTHONPATH=str(ROOT),
    )
    assert run.returncode == 0, run.output[-3000:]
    assert LIVE in run.log
    assert f"routes of {64} rows as sampled" in run.log
    rows = [np.load(path) for path in sorted(tmp_path.glob("*.npz"))]
    assert len(rows) >= 2 * 128
    two = [row for row in rows if "turn1" in row]
    assert len(two) > len(rows) / 2
    for row in two:
        first, second, final, mask = row["turn0"], row["turn1"], row["final"], row["mask"]
        # The tool's tokens lie between the turns.
        assert 0 in mask
        assert len(final) == len(second) == int(row["prompt"]) + len(mask) - 1
        assert np.array_equal(final[: len(first)], first)
        assert np.array_equal(final[len(first) :], second[len(first) :])
        assert not np.array_equal(final, second)
