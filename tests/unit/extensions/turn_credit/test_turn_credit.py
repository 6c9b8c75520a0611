"""Turn-level credit on verl's own batches: tool tokens, rewards of agent loops, several rows per rollout, and
start-up.
"""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import NonTensorStack
from torch import Tensor

from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.turn_credit import TurnCredit, compute_advantages
from recipe.offpolicy.proof.verify import LivenessError
from tests.support.judged import judge
from tests.support.shaped import Rows, estimate, make_batch, make_queue_batch, nest, report

# Two turns of 2 and 1 tokens around a tool's 2 tokens; one turn; two turns around a tool's token; another group.
MASKS = ([1, 1, 0, 0, 1], [1, 1, 1], [1, 0, 1, 1], [1, 0, 1])
ROWS: Rows = [("a", 5, 1.0), ("a", 3, 0.0), ("a", 4, 0.0), ("b", 3, 1.0)]
TOOLS: list[Any] = [[0.5], [], [0.0], [0.25]]
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "gamma": 1.0, "use_kl_in_reward": False},
    "actor_rollout_ref": {"rollout": {"n": 8, "agent": {"default_agent_loop": "tool_agent"}}},
}


def made(normalize: str = "turn_index", turn_rewards: str | None = "tool_rewards", **settings: Any) -> TurnCredit:
    extension = TurnCredit("turn_credit", {"normalize": normalize, "turn_rewards": turn_rewards, **settings})
    extension.begin(OmegaConf.create(CONFIG))
    return extension


def batch(tools: list[Any] | None = TOOLS, rows: Rows = ROWS) -> Any:
    fields: dict[str, Any] = {} if tools is None else {"tool_rewards": tools, "turn_scores": [[]] * len(rows)}
    view = make_batch(rows, **fields)
    for row, mask in enumerate(MASKS[: len(rows)]):
        view.batch.batch["response_mask"][row, : len(mask)] = torch.tensor(mask)
    return view


def deal(view: Any, *extensions: Any) -> Tensor:
    AddOns(extensions).compute_advantages(view, estimate(view))
    advantages: Tensor = view.advantages
    return advantages


def test_each_turn_has_one_value_and_tool_tokens_have_none() -> None:
    """Returns of group a: turn 0: 1.5, 0, 0; turn 1: 1, 0 (the second rollout has one turn). b is alone."""
    view = batch()
    found = deal(view, made())
    assert found[:, :5].tolist() == [
        [1.0, 1.0, 0.0, 0.0, 0.5],
        [-0.5, -0.5, -0.5, 0.0, 0.0],
        [-0.5, 0.0, -0.5, -0.5, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]
    assert not bool(found[:, 5:].any())
    assert torch.equal(view.batch.batch["returns"], found)


def test_metrics_by_hand() -> None:
    extension, view = made(), batch()
    deal(view, extension)
    assert extension.metrics() == pytest.approx(
        {
            "turn_credit/turns": 7 / 4,
            "turn_credit/rewarded_share": 3 / 7,
            "turn_credit/varied_share": 1 / 4,
            "turn_credit/lone_turns": 2.0,
        }
    )
    assert judge(extension, report(view, extension))["turn_credit/live/changed_rows"] == 4.0


def test_effects_that_never_come_are_said() -> None:
    extension, view = made(turn_rewards=None), make_batch(ROWS)
    deal(view, extension)
    judge(extension, report(view, extension))
    assert extension.unproved() == "no rollout had more than one turn (actor_rollout_ref.rollout.multi_turn)."
    deal(batch(rows=[("a", 5, 1.0), ("a", 3, 1.0), ("a", 4, 1.0)]), extension)
    assert extension.unproved() == "the turns of each rollout had equal advantages (turn_credit.turn_rewards)."


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (None, "verl's agent loop returned no tool_rewards for sequence 0"),
        ([[], [], [0.0], [0.0]], "sequence 0 has 2 turns and 0 tool_rewards"),
        ([[0.5] * 3, [], [0.0], [0.0]], "sequence 0 has 2 turns and 3 tool_rewards"),
        ([[0.5], [], [float("nan")], [0.0]], "of sequence 2 are"),
    ],
)
def test_rewards_without_a_turn_stop_the_run(tools: list[Any] | None, said: str) -> None:
    with pytest.raises(LivenessError, match=said):
        deal(batch(tools), made())


def test_a_reward_after_the_last_turn_counts_for_it_and_a_row_without_tokens_has_none() -> None:
    """A tool whose answer no longer fits has rewarded the last turn. Returns of turn 0: 1.5 + 2 and 1."""
    view = batch([[0.5, 2.0], [1.0], [9.0], [0.0]])
    view.batch.batch["response_mask"][2] = 0
    found = deal(view, made())
    assert found[:3, 0].tolist() == pytest.approx([1.25, -1.25, 0.0])


def test_a_rollout_of_several_rows_is_one_sequence_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On V1, session 0 has two rows, of 2 and 1 turns, and the last row has the score. Padding rows are left out."""
    masks = [[1, 0, 1], [1, 1], [1, 0, 1, 0, 1], [1]]
    tools = [[1.0, 0.0], [], [0.0, 0.5], [7.0]]
    scores = [[0.0, 0.0, 2.0], [0.0, 2.0], [0.0] * 5, [5.0]]

    def nested(rows: list[Any]) -> Tensor:
        return nest([torch.tensor(row, dtype=torch.float32) for row in rows])

    store: dict[str, Any] = {
        "response_mask": nested(masks),
        "extra_fields": NonTensorStack(*({"tool_rewards": each, "turn_scores": []} for each in tools)),
        **dict.fromkeys(("rm_scores", "responses", "prompts"), nested(scores)),
    }
    view = make_queue_batch(monkeypatch, store, ["a_0_0", "a_0_1", "a_1_0", "pad_0_0"])
    found = made().estimate(view, view.scores)
    # Returns of the first: 1 + 0 + 2, 2, 2; of the second: 0.5, 0.5, 0.
    assert found.tolist() == [[1.25, 0.0, 0.75, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0], [-1.25, 0.0, -0.75, 0.0, -1.0]]


# Turn-level advantages against hand-worked numbers, a float64 loop, and GRPO


NAN = math.nan
REWARDS = st.sampled_from([0.0, 1.0, 0.5, -2.0, 0.1])
ROLLOUTS = st.lists(st.tuples(st.lists(st.none() | REWARDS, max_size=4), REWARDS), min_size=1, max_size=5)


def compute(rows: list[list[float]], scores: list[float] | None, **how: object) -> list[list[float]]:
    width = max(map(len, rows), default=0)
    table = torch.full((len(rows), width), NAN, dtype=torch.float64)
    for at, row in enumerate(rows):
        table[at, : len(row)] = torch.tensor(row, dtype=torch.float64)
    counts = torch.tensor([len(row) for row in rows])
    ends = None if scores is None else torch.tensor(scores, dtype=torch.float64)
    found = compute_advantages(counts, table, ends, **how)  # type: ignore[arg-type]
    assert not bool(found[torch.arange(width) >= counts[:, None]].any())
    return [row[: len(given)] for row, given in zip(found.tolist(), rows, strict=True)]


def standardise(values: list[float], by_std: bool) -> list[float]:
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    return [(value - mean(values)) / (stdev(values) if by_std else 1.0) for value in values]


@pytest.mark.parametrize("normalize", ["turn_index", "return_to_go"])
@given(rollouts=ROLLOUTS, by_std=st.booleans(), gamma=st.sampled_from([1.0, 0.5]), episode=st.booleans())
def test_it_is_the_loop_in_float64(
    normalize: str, rollouts: list[tuple[list[float | None], float]], by_std: bool, gamma: float, episode: bool
) -> None:
    rows = [[NAN if each is None else each for each in row] for row, _ in rollouts]
    scores = [score for _, score in rollouts] if episode else None
    how = {"normalize": normalize, "coef": 2.0, "gamma": gamma, "by_std": by_std}
    found = compute(rows, scores, **how)
    earned = [[0.0 if math.isnan(each) else each for each in row] for row in rows]
    ends = scores or [0.0] * len(rows)
    if normalize == "return_to_go":
        paid = [(i, k) for i, row in enumerate(rows) for k, each in enumerate(row) if not math.isnan(each)]
        for (i, k), value in zip(paid, standardise([rows[i][k] for i, k in paid], by_std), strict=True):
            earned[i][k] = value
        there = [i for i, row in enumerate(rows) if row]
        ends = dict(zip(there, standardise([ends[i] for i in there], by_std), strict=True))  # type: ignore[assignment]
    returns = [
        [
            sum(
                gamma ** (at - k) * (2.0 * row[at] + (ends[i] if at == len(row) - 1 else 0.0))
                for at in range(k, len(row))
            )
            for k in range(len(row))
        ]
        for i, row in enumerate(earned)
    ]
    if normalize == "turn_index":
        for k in range(max(map(len, rows))):
            members = [i for i, row in enumerate(rows) if len(row) > k]
            values = standardise([round(returns[i][k], 12) for i in members], by_std)
            for i, value in zip(members, values, strict=True):
                returns[i][k] = value
    for row, one in zip(found, returns, strict=True):
        assert row == pytest.approx(one, abs=1e-6)
