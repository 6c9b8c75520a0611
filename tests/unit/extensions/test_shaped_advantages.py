"""What the extensions that change advantages have in common: the proof, and rejected rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from recipe.offpolicy.batch.plan import decide_rollout
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_on import Extension
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.extensions.turn_credit import TurnCredit
from recipe.offpolicy.extensions.vcpo import OptimalBaseline
from recipe.offpolicy.proof.verify import LivenessError
from tests.support.judged import judge
from tests.support.shaped import WIDTH, Rows, make_batch, report, shape

MADE: dict[str, tuple[type[Extension], dict[str, Any], str]] = {
    "length": (LengthPenalty, {"kind": "group"}, "length penalty"),
    "dropped answers": (LengthPenalty, {"kind": "none", "truncated": "drop"}, ""),
    "loo": (PassAtK, {"objective": "loo", "k": 2}, "pass@k"),
    "loo_minus_one": (PassAtK, {"objective": "loo_minus_one", "k": 2}, "pass@k"),
    "analytic": (PassAtK, {"objective": "analytic", "k": 2}, "pass@k"),
    "groups": (PassAtK, {"objective": "groups", "k": 2, "seed": 1}, "pass@k"),
    "baseline": (OptimalBaseline, {"over": "group"}, "optimal baseline"),
    "turns": (TurnCredit, {"normalize": "turn_index"}, "turn-level credit"),
}
"""Class, settings and name in the log, which says nothing of answers that are dropped."""
ACTOR = {"ppo_mini_batch_size": 2, "loss_agg_mode": "token-mean"}
CONFIG = OmegaConf.create(
    {
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "gamma": 1.0},
        "actor_rollout_ref": {"actor": ACTOR, "rollout": {"n": 4}},
        "data": {"max_response_length": WIDTH},
    }
)
A: Rows = [("a", 2, 1.0), ("a", 4, 0.0), ("a", 6, 1.0), ("a", 8, 0.0)]
B: Rows = [("b", 3, 1.0), ("b", 12, 0.0), ("b", 5, 0.0), ("b", 7, 1.0)]
ROWS = [*A, *B]
LEFT = [0, 2, 3, 4, 5, 6, 7]


def make(name: str) -> Extension:
    kind, settings, _ = MADE[name]
    section = {"LengthPenalty": "length_penalty", "PassAtK": "pass_at_k", "TurnCredit": "turn_credit"}
    made = kind(section.get(kind.__name__, "optimal_baseline"), settings)
    made.begin(CONFIG)
    return made


def batch(rows: Rows) -> Any:
    """Answers of six or eight tokens are two turns."""

    def uncorrected(data: Any) -> Any:
        policies = dict.fromkeys(("old_log_probs", "rollout_log_probs"), torch.zeros(len(data), WIDTH))
        return decide_rollout(CorrectionSpec(), data.batch.select("response_mask").update(policies), 1)

    view = make_batch(rows, decide=uncorrected)
    view.batch.batch["response_mask"][[tokens in (6, 8) for _, tokens, _ in rows], 1] = 0
    return view


def change_advantages(data: TensorDict) -> None:
    data["advantages"] = data["advantages"] + 0.01 * data["response_mask"]


def lose_a_row(data: TensorDict) -> None:
    data["response_mask"][0] = 0


@pytest.mark.parametrize("name", MADE)
def test_the_proof_passes_once_and_finds_what_did_not_arrive(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made, view = make(name), batch(ROWS)
    shape(view, made)
    with caplog.at_level("INFO"):
        found = [judge(made, report(view, made)) for _ in range(2)][-1]
    assert found[f"offpolicy/live/{made.section}"] == 1.0
    assert caplog.text.count(f"{MADE[name][2]} LIVE on") == bool(MADE[name][2])
    changes: dict[str, Callable[[TensorDict], None]] = {
        "8 missing or changed .* 8 were not sent with this content": change_advantages,
        r"8 of 8 rows expected, 7 seen: 1 missing or changed \(0\)": lose_a_row,
    }
    for said, change in changes.items():
        with pytest.raises(LivenessError, match=said):
            judge(made, report(view, made, change))


@pytest.mark.parametrize("name", [name for name in MADE if name != "groups"])  # which deals rows at random
def test_a_rejected_row_is_as_if_it_were_not_there(name: str) -> None:
    view = batch(ROWS)
    view.regroup(["a", "a/rejected-1", "a", "a", *"bbbb"], [row == 1 for row in range(8)])
    found = shape(view, make(name))
    without = shape(batch([ROWS[row] for row in LEFT]), make(name))
    assert float(found[1]) == 0.0
    torch.testing.assert_close(found[LEFT], without, atol=0, rtol=0)
    assert bool(without.any())
