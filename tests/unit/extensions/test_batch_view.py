"""Hooks around verl's own estimator on the batches of both trainers, and the rows that extensions see; by hand."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipe.offpolicy.batch.plan import PLAN, Groups, SharedPlan
from recipe.offpolicy.batch.seals import find_difference
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_on import Extension
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.advantage_proof import AdvantageWorker, name_hashes
from recipe.offpolicy.extensions.batch_view import read_sessions
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.trainer.batch_view import DataProtoBatch
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY, take_packets
from tests.support import training_worker as tw
from tests.support.corrections import TIS
from tests.support.distilled import rollout
from tests.support.nudge import Nudge
from tests.support.shaped import make_batch, make_queue_batch, nest
from verl.utils import tensordict_utils as tu

LENGTHS = (3, 1, 2)
SCORES = (1.0, 0.0, 3.0)


def scores() -> list[Tensor]:
    return [torch.cat([torch.zeros(n - 1), torch.tensor([s])]) for n, s in zip(LENGTHS, SCORES, strict=True)]


@pytest.fixture
def v1(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three rows, of which two are outputs of one session, and two padding rows that look like the first row."""
    store: dict[str, Any] = {
        "rm_scores": nest([*scores(), torch.zeros(1), torch.zeros(1)]),
        "response_mask": nest([torch.ones(n, dtype=torch.int64) for n in LENGTHS] + 2 * [torch.zeros(1).long()]),
    }
    return make_queue_batch(monkeypatch, store, ["a_0_0", "a_0_1", "b_0_0", "pad_0_0", "pad_1_0"], 7), store


@pytest.fixture
def v0() -> Any:
    view = make_batch(list(zip("aab", LENGTHS, SCORES, strict=True)), step=7, width=3)
    return view, view.batch.batch


@pytest.fixture(params=["v0", "v1"])
def batch(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def estimator(view: Any, store: Any, seen: list[Tensor], fails: bool = False) -> Any:
    """An estimator that returns the row's reward at each of its tokens."""

    def run() -> None:
        name = "token_level_rewards" if isinstance(view, DataProtoBatch) else "rm_scores"
        seen.append(store[name])
        if fails:
            raise RuntimeError("verl's estimator failed")
        rewards, mask = view.rows(name)[name], view.rows("response_mask")["response_mask"]
        view.put_advantages(rewards.sum(-1, keepdim=True) * mask, returns=True)

    return run


def test_two_extensions_shape_in_their_order(batch: Any) -> None:
    """Bonuses of 0.5 and 0.25 per token: rewards 1 + 3 x 0.75, 0 + 0.75, 3 + 2 x 0.75; each advantage is shifted by
    0.5.
    """
    view, store = batch
    hooks = AddOns([Nudge("one", {}), Nudge("two", {"bonus": 0.25})])
    hooks.compute_advantages(view, estimator(view, store, []))
    expected = torch.tensor([[3.75, 3.75, 3.75], [1.25, 0, 0], [5.0, 5.0, 0]])
    torch.testing.assert_close(view.advantages, expected)
    torch.testing.assert_close(view.rows("returns")["returns"], torch.tensor([[3.25] * 3, [0.75, 0, 0], [4.5, 4.5, 0]]))


class Raises(Extension):
    def __init__(self, hook: str) -> None:
        super().__init__("raises", {})

        def fail(batch: Any, values: Tensor) -> Tensor:
            values += 100  # what a hook is given is its own
            raise RuntimeError(hook)

        setattr(self, hook, fail)


@pytest.mark.parametrize("fails", [None, "verl's estimator", "shape_rewards", "estimate", "shape_advantages"])
def test_raw_scores_are_back_afterwards_to_the_bit(batch: Any, fails: str | None) -> None:
    view, store = batch
    name = "token_level_rewards" if isinstance(view, DataProtoBatch) else "rm_scores"
    raw, seen = store[name], []
    last = [Raises(fails)] if fails and "verl" not in fails else []
    run = estimator(view, store, seen, fails == "verl's estimator")
    with pytest.raises(RuntimeError, match=fails) if fails else contextlib.nullcontext():
        AddOns([Nudge("one", {}), *last]).compute_advantages(view, run)
    assert store[name] is raw
    assert all(each is not raw for each in seen)
    assert (raw.values() if raw.is_nested else raw).sum() == sum(SCORES)


class Estimates(Extension):
    def estimate(self, batch: Any, rewards: Tensor) -> Tensor:
        return 2 * rewards.sum(-1, keepdim=True) * batch.rows("response_mask")["response_mask"]


def test_an_estimate_takes_the_place_of_verls_and_leaves_silent_rows_at_zero(batch: Any) -> None:
    view, store = batch
    view.regroup(
        [*"abc", "pad", "pad"][: len(view.is_padding)], [False, False, True, True, True][: len(view.is_padding)]
    )
    AddOns([Estimates("e", {})]).compute_advantages(view, estimator(view, store, []))
    torch.testing.assert_close(view.advantages, torch.tensor([[2.0, 2.0, 2.0], [0, 0, 0], [0, 0, 0]]))
    assert list(view.uids) == ["a", "b", "c"]


def test_rejected_rows_are_silent_even_where_verl_estimates_nan(batch: Any) -> None:
    view, store = batch
    rows = len(view.is_padding)
    uids = ["a", "a", "b", "pad_0", "pad_1"][:rows]
    if not isinstance(view, DataProtoBatch):
        store["uid"] = uids
    groups = Groups(["a", "a/rejected-1", "b", "x", "y"][:rows], [False, True, False, True, True][:rows], {})
    with view.without_rejected(groups):
        assert view.list_uids() == groups.uids
        view.put_advantages(torch.tensor([[1.0, 1, 1], [torch.nan, 0, 0], [-2, -2, 0]]), returns=True)
    assert view.list_uids() == uids
    for name in ("advantages", "returns"):
        assert view.rows(name)[name].tolist() == [[1, 1, 1], [0, 0, 0], [-2, -2, 0]]


def test_padding_rows_never_reach_an_extension_and_a_session_counts_once(v1: Any) -> None:
    view, store = v1
    extension = Nudge("one", {})
    AddOns([extension]).on_rollout(view)
    assert extension.sessions == 2
    assert list(view.uids) == ["a", "a", "b"]
    assert extension.shipped == (3, 6.0)
    assert [row.tolist() for row in store["offpolicy_one"].unbind()] == [[1, 1, 1], [1], [1, 1], [0], [0]]


def test_columns_have_a_name_that_reaches_every_worker(batch: Any) -> None:
    view, _ = batch
    with pytest.raises(ValueError, match="offpolicy_mine"):
        view.put(mine=torch.zeros(3))
    with pytest.raises(ValueError, match="2 rows, but the batch has 3"):
        view.put(offpolicy_mine=torch.zeros(2))


@pytest.mark.parametrize("given", [torch.zeros(2, 3), torch.full((3, 3), torch.nan)])
def test_what_a_hook_returns_is_looked_at(batch: Any, given: Tensor) -> None:
    view, store = batch
    extension = Extension("odd", {})
    extension.shape_rewards = lambda batch, rewards: given  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="odd: shape_rewards"):
        AddOns([extension]).compute_advantages(view, estimator(view, store, []))


@pytest.mark.parametrize("reports", [[], [{"one": (3, 6.0)}, {}], [{"two": (3, 6.0)}]])
def test_a_missing_report_stops_the_run(batch: Any, reports: list[Any]) -> None:
    view, store = batch
    hooks = AddOns([Nudge("one", {})])
    hooks.next_batch(view)
    hooks.compute_advantages(view, estimator(view, store, []))
    with pytest.raises(LivenessError, match=r"one: .* have no report"):
        hooks.judge(reports)


def test_an_update_without_advantages_of_ours_stops_the_run(batch: Any) -> None:
    """This applies to every update: shaping in the last update is no evidence for this one."""
    view, store = batch
    extension = Nudge("one", {})
    hooks = AddOns([extension])
    hooks.compute_advantages(view, estimator(view, store, []))
    with pytest.raises(LivenessError, match="one: verl's trainer did not call the hook that runs before sampling"):
        hooks.judge([{"one": extension.shipped}])
    hooks.next_batch(view)
    hooks.judge([{"one": extension.shipped}])
    with pytest.raises(LivenessError, match="one: verl's trainer did not call the hooks"):
        hooks.judge([{"one": extension.shipped}])


def test_every_extension_ends_also_where_one_fails() -> None:
    first, last = Nudge("one", {}), Nudge("two", {})
    last.end = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        AddOns([first, last]).end()
    assert first.ended


# Sessions of several rows count once, and prompts keep their identity over steps


class Outputs:
    """Rows 0 and 1 are outputs of one session."""

    def __init__(self) -> None:
        self._view = make_batch([("a", 3, 0.0), ("a", 2, 1.0), ("a", 4, 0.0), ("b", 5, 1.0)])
        self.sessions = ["x", "x", "y", "z"]
        self.silent = torch.tensor([False, False, False, True])

    def __getattr__(self, name: str) -> object:
        return getattr(self._view, name)


def test_a_session_has_its_last_rows_score_and_all_its_tokens() -> None:
    found = read_sessions(Outputs(), most_tokens=4)  # type: ignore[arg-type]
    assert found.of_row.tolist() == [0, 0, 1, 2]
    assert found.last.tolist() == [1, 2, 3]
    assert found.tokens.tolist() == [5.0, 4.0, 5.0]
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert found.truncated.tolist() == [False, True, True]
    assert found.groups() == {"a": [0, 1]}  # that of b is silent


# What arrives in the workers is held against what was shipped, as multisets of rows


@pytest.mark.verl(">=0.8")
@pytest.mark.parametrize("spec", [CorrectionSpec(), CorrectionSpec.from_mapping({"weight": TIS})], ids=["none", "tis"])
def test_the_workers_loss_reports_the_rows_that_came(spec: CorrectionSpec) -> None:
    """The engine's own layout, nested by row, is compared with the trainer's padded layout."""
    made, flat, whole = rollout()
    data = made.to_tensordict()
    tokens = int(data["response_mask"].values().sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=6, **{PLAN: SharedPlan(1)})
    loss = OffPolicyLoss(spec, tw.actor_config(), extensions={"x": AdvantageWorker()})
    offsets = torch.tensor([0, *whole]).cumsum(0)
    log_probs = torch.nested.nested_tensor_from_jagged(flat.clone().requires_grad_(), offsets)
    _, metrics = loss({"log_probs": log_probs}, data)
    (packet,) = take_packets({METRIC_KEY: metrics[METRIC_KEY]})
    names = ("responses", "response_mask", "advantages")
    columns = {name: pad_sequence(getattr(made, name), batch_first=True) for name in names}
    view: Any = SimpleNamespace(keys="abcdef")
    shipped = name_hashes(view, columns["responses"], columns["response_mask"].bool(), columns["advantages"])
    assert len(shipped) == 6
    assert find_difference(shipped, packet.reports["x"].hashes) is None
