"""The extension on the batches of both trainers, with GRPO and with a per-token estimator."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from recipe.offpolicy.batch.seals import hash_rows
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.advantage_proof import AdvantageReport
from recipe.offpolicy.extensions.process_reward.prefix_scorer import FIELD, RowValues
from recipe.offpolicy.extensions.process_reward.prefix_value_rewards import COMPARISONS, PrefixValueRewards
from recipe.offpolicy.extensions.process_reward.utilities import UTILITY, token_advantages
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.trainer.batch_view import DataProtoBatch
from tests.support.judged import judge
from tests.support.shaped import make_batch, make_queue_batch, nest
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

LENGTHS, SCORES, UIDS = (4, 3, 4, 2), (1.0, 0.0, 0.0, 0.0), ("a", "a", "b", "b")
STEP, VERSION = 5, 4
VALUES = [
    RowValues([2, 4], [-1.5, -1.0, -0.2], VERSION, [([8, 9], 1)], [0, 0, 0]),
    RowValues([1, 3], [-1.5, -1.7, -3.0], VERSION, [([8, 9], 1)], [0, 0, 0]),
    RowValues([3, 4], [-1.6, -1.1, -1.5], VERSION, [([8, 7, 9], 2)], [0, 0, 0]),
    RowValues([2], [-1.6, -1.2], VERSION, [([8, 7, 9], 2)], [0, 0]),
]
RESPONSES = torch.tensor([[10 * (row % 2)] * 4 for row in range(4)])
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
SENT = [{FIELD: asdict(each), "max_global_steps": VERSION} for each in VALUES]


def scores() -> Tensor:
    found = torch.zeros(4, 4)
    found[range(4), [n - 1 for n in LENGTHS]] = torch.tensor(SCORES)
    return found


class Forward:
    """The trainer's own forward pass: every log-prob is the engine's, shifted by ``off``."""

    def __init__(self, off: float = 0.0) -> None:
        self.off, self.asked = off, [tuple[list[int], list[int]]] * 0

    def __call__(self, batch: Any, rows: Any) -> list[list[float]]:
        self.asked += rows
        found = []
        for _, response in rows:
            value = {(8, 9): VALUES[:2], (7, 9): VALUES[2:]}[tuple(response[-2:])]
            end = len(response) - (2 if response[-2] == 8 else 3)
            row = next(each for each in value if end == 0 or end in each.ends)
            row = value[int(response[0] // 10)] if end else row
            number = row.ends.index(end) + 1 if end else 0
            found.append([-99.0] * (len(response) - 2) + [row.values[number] + self.off] * 2)
        return found


def v0(sent: list[Any], forward: Any) -> Any:
    columns = {name: [each[name] for each in sent] for name in sent[0]}
    view = make_batch(list(zip(UIDS, LENGTHS, SCORES, strict=True)), STEP, width=4, **columns)
    view.batch.batch["responses"], view._forward = RESPONSES, forward
    return view


def v1(sent: list[Any], forward: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A batch with a padding row at the end."""

    def nested(rows: Tensor, pad: Tensor) -> Tensor:
        return nest([*(row[:n] for row, n in zip(rows, LENGTHS, strict=True)), pad])

    store: dict[str, Any] = {
        "rm_scores": nested(scores(), torch.zeros(1)),
        "response_mask": nested(MASK.long(), torch.zeros(1).long()),
        "responses": nested(RESPONSES, torch.zeros(1).long()),
        "prompts": nest([torch.ones(1).long()] * 5),
        "extra_fields": [*sent, {}],
    }
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "pad_0_0"]
    return make_queue_batch(monkeypatch, store, keys, STEP, forward=forward)


@pytest.fixture(params=["v0", "v1"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build the view of a batch with the data from agent loops."""

    def make(sent: list[Any] = SENT, forward: Any = None) -> Any:
        forward = forward or Forward()
        return v0(sent, forward) if request.param == "v0" else v1(sent, forward, monkeypatch)

    return make


def extension(estimator: str = "grpo", **settings: Any) -> PrefixValueRewards:
    made = PrefixValueRewards("process_reward", settings)
    algorithm = {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0}
    parts = {"actor": {"strategy": "fsdp2"}, "rollout": {"dtype": "bfloat16"}}
    config = {"algorithm": algorithm, "actor_rollout_ref": parts, "process_reward": settings}
    made.begin(OmegaConf.create(config))
    return made


def grpo(rewards: Tensor) -> Tensor:
    found: Tensor = get_adv_estimator_fn("grpo")(rewards, MASK.long(), index=np.array(UIDS, dtype=object))[0]
    return found


def run(view: Any, made: PrefixValueRewards, seen: list[Tensor] | None = None) -> Tensor:
    """Return the advantages of a step, computed by verl's GRPO between the hooks."""

    def estimator() -> None:
        name = "token_level_rewards" if isinstance(view, DataProtoBatch) else "rm_scores"
        rewards = view.rows(name)[name]
        if seen is not None:
            seen.append(rewards)
        view.put_advantages(grpo(rewards), returns=True)

    hooks = AddOns([made])
    hooks.on_rollout(view)
    hooks.compute_advantages(view, estimator)
    found: Tensor = view.advantages
    return found


def process(normalize: str = "zscore") -> Tensor:
    """Process advantages from utilities, by hand."""
    u = torch.tensor([[0, 0.5, 0, 0.8], [-0.2, 0, -1.3, 0], [0, 0, 0.5, -0.4], [0, 0.4, 0, 0]])
    return token_advantages(u, u != 0, UIDS, MASK, normalize=normalize)


@pytest.mark.parametrize("normalize", ["zscore", "scale", "none"])
def test_process_advantages_are_added_to_the_outcomes(build: Any, normalize: str) -> None:
    found = run(build(), extension(normalize=normalize, coef=0.5))
    torch.testing.assert_close(found, grpo(scores()) + 0.5 * process(normalize), rtol=1e-5, atol=1e-6)


WASTED = torch.tensor([[0, 0, 0, 0], [0.1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])


def test_a_wasted_episode_lowers_its_tokens_and_earlier_ones(build: Any) -> None:
    """|U| <= 0.25 only in row 1, whose first episode is one token, so it loses coef x penalty."""
    settings: dict[str, Any] = {"normalize": "none", "coef": 0.5}
    found = run(build(), made := extension(**settings, waste={"within": 0.25, "penalty": 0.2}))
    torch.testing.assert_close(run(build(), extension(**settings)) - found, WASTED)
    assert made.metrics()["process_reward/waste/share"] == pytest.approx(1 / 7)
    assert made.metrics()["process_reward/waste/token_share"] == pytest.approx(1 / 13)
    assert made.unproved() is None
    run(build(), never := extension(**settings, waste={"within": 0.0, "penalty": 0.2}))
    assert "so none is penalised (process_reward.waste)" in str(never.unproved())


def test_a_monte_carlo_check_is_a_metric_and_its_absence_is_said(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """V -0.2, -1.7, -1.1 and -1.2 compared with means 0.9, 0.1, 0.3 and 0.2: both have ranks 4, 1, 3, 2."""
    settings = {"monte_carlo": {"every": 2, "share": 1.0}}
    chosen = [(2, 0.9), (1, 0.1), (1, 0.3), (1, 0.2)]
    sent = [
        {**each, FIELD: {**each[FIELD], "monte_carlo": {"number": number, "mean": mean, "tokens": 8}}}
        for each, (number, mean) in zip(SENT, chosen, strict=True)
    ]
    run(build(sent), made := extension(**settings))
    metrics = made.metrics()
    assert metrics["process_reward/monte_carlo/rank_correlation"] == pytest.approx(1.0)
    assert (metrics["process_reward/monte_carlo/prefixes"], made.unproved()) == (4.0, None)
    run(build(), silent := extension(**settings))
    assert "process_reward/monte_carlo/prefixes" not in silent.metrics()
    assert "no sequence was chosen (process_reward.monte_carlo)" in str(silent.unproved())
    lost = [{**each, FIELD: {**each[FIELD], "monte_carlo": {"number": 0, "error": "no reward"}}} for each in SENT]
    run(build(lost), failed := extension(**settings))
    assert caplog.text.count("a prefix has no estimate: no reward") == 1
    assert failed.metrics()["process_reward/monte_carlo/lost"] == 4.0
    assert "no prefix has a Monte-Carlo value: no reward" in str(failed.unproved())


def test_the_outcome_is_untouched_to_the_bit_where_no_process_advantage_is(build: Any) -> None:
    flat = [
        {**each, FIELD: {**each[FIELD], "values": [-1.0 - row] * len(each[FIELD]["values"])}}
        for row, each in enumerate(SENT)
    ]
    made = extension()
    made._comparisons = COMPARISONS[True]
    assert torch.equal(run(build(flat), made), grpo(scores()))


def test_an_estimator_by_token_gets_normalised_utilities_among_its_rewards(build: Any) -> None:
    made, seen = extension("reinforce_plus_plus", normalize="none"), []
    view = build()
    run(view, made, seen)
    u = torch.tensor([[0, 0.5, 0, 0.8], [-0.2, 0, -1.3, 0], [0, 0, 0.5, -0.4], [0, 0.4, 0, 0]])
    torch.testing.assert_close(seen[0], scores() + u)
    torch.testing.assert_close(view.scores, scores())


def test_rows_that_left_their_group_are_silent_and_in_no_statistic_of_it(build: Any) -> None:
    """Row 1 is rejected, so row 0 is alone in its group; its two utilities are 0.5 and 0.8."""
    view = build()
    padded = not isinstance(view, DataProtoBatch)
    view.regroup(["a", "a#1", "b", "b", *["pad"] * padded], [False, True, False, False, *[False] * padded])
    made = extension()
    found = run(view, made) - grpo(scores())
    alone = torch.tensor([0.5, 0.8])
    spread = (alone - alone.mean()) / alone.std()
    torch.testing.assert_close(found[0], torch.tensor([0.0, 0.0, spread[1], spread[1]]), rtol=1e-4, atol=1e-5)
    assert found[1].abs().max() == 0


def test_values_of_other_weights_stop_the_run(build: Any) -> None:
    other = [{**each, FIELD: {**each[FIELD], "version": 3}, "max_global_steps": 3} for each in SENT]
    with pytest.raises(LivenessError, match="sampled by version 4: the engine was not synchronised"):
        run(build(other), extension())


def test_eight_prefixes_are_scored_again_by_the_trainer_at_the_first_two_steps(build: Any) -> None:
    forward, made = Forward(), extension()
    for expected in (8, 16, 16):
        run(build(forward=forward), made)
        live = judge(made, [AdvantageReport(tuple(made._sent.values()))])
        assert (len(forward.asked), live["process_reward/live/compared_prefixes"]) == (expected, expected)
    assert {response[-1] for _, response in forward.asked} == {9}


def test_an_engine_with_other_weights_stops_at_the_first_step_and_behind_a_synchronisation(build: Any) -> None:
    with pytest.raises(LivenessError, match="has different weights, or reads a stale prefix cache"):
        run(build(forward=Forward(off=-0.06)), extension())
    run(build(forward=Forward(off=-0.04)), made := extension())
    with pytest.raises(LivenessError, match="has different weights"):
        run(build(forward=Forward(off=-0.06)), made)


def test_prefixes_are_scored_again_after_so_many_steps(build: Any) -> None:
    forward, made, asked = Forward(), extension(probe_every=3), []
    made._comparisons, made._compared_at = COMPARISONS[True], STEP - 3
    for _ in range(2):
        run(build(forward=forward), made)
        asked.append(len(forward.asked))
    assert asked == [8, 8]
    made._compared_at = STEP - 3
    with pytest.raises(LivenessError, match="has different weights"):
        run(build(forward=Forward(off=-0.06)), made)


def test_values_of_zero_are_put_to_the_trainer_at_once(build: Any) -> None:
    zeros = [{**each, FIELD: {**each[FIELD], "values": [0.0] * len(each[FIELD]["values"])}} for each in SENT]
    for synchronous in (True, False):
        made = extension()
        made._comparisons, made._synchronous = COMPARISONS[synchronous], synchronous
        with pytest.raises(LivenessError, match=r"has different weights|sequences contain only zeros"):
            run(build(zeros), made)


def test_the_workers_have_to_see_the_trainers_advantages(build: Any) -> None:
    made, view = extension(), build()
    advantages = run(view, made)
    seen = hash_rows(view.rows("responses")["responses"], MASK, advantages)
    judge(made, [AdvantageReport(tuple(seen.tolist()))])
    other = hash_rows(view.rows("responses")["responses"], MASK, grpo(scores()))
    with pytest.raises(LivenessError, match="4 of 4 rows expected, 4 seen: 4 missing or changed"):
        judge(made, [AdvantageReport(tuple(other.tolist()))])
    with pytest.raises(LivenessError, match="offpolicy_process_utility did not reach the loss"):
        judge(made, [AdvantageReport(None, (UTILITY,))])
