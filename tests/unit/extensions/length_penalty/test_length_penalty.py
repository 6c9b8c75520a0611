"""The extension on verl's own estimators: both places, what stays as it was, and the proof."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.batch_view import read_sessions
from recipe.offpolicy.extensions.length_penalty import length_penalty, penalties
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.fault_tolerance.state_schema import CheckpointError
from recipe.offpolicy.proof.verify import LivenessError
from tests.support import judged
from tests.support.shaped import Rows, estimate, make_batch, report, shape

ALL_RIGHT: Rows = [("a", tokens, 1.0) for tokens in (4, 5, 6, 7, 8, 9, 10, 11)]
MIXED: Rows = [("b", 2, 1.0), ("b", 4, 0.0), ("b", 6, 1.0), ("b", 8, 0.0)]


def penalty(kind: str, *, estimator: str = "grpo", by_std: bool = True, **settings: Any) -> LengthPenalty:
    made = LengthPenalty("length_penalty", {"kind": kind} | settings)
    algorithm = {"adv_estimator": estimator, "norm_adv_by_std_in_grpo": by_std}
    made.begin(OmegaConf.create({"algorithm": algorithm, "data": {"max_response_length": 12}}))
    return made


def plain(rows: Rows, **how: Any) -> Tensor:
    return shape(make_batch(rows), **how)


def judge(made: LengthPenalty, view: Any, change: Any = lambda data: None) -> dict[str, float]:
    return judged.judge(made, report(view, made, change))


def test_after_it_a_mixed_group_is_rewards_less_penalties_over_the_rewards_spread() -> None:
    found = shape(make_batch(MIXED), penalty("uniform", coefficient=0.01))
    lowered = torch.tensor([0.98, -0.04, 0.94, -0.08]).double()
    spread = (1 / 3) ** 0.5 + 1e-6
    torch.testing.assert_close(found, (lowered - lowered.mean()) / spread, atol=1e-6, rtol=0)


def test_skipped_groups_are_verls_to_the_bit() -> None:
    for place in ("after", "before"):
        found = shape(make_batch([*ALL_RIGHT, *MIXED]), penalty("uniform", zero_variance="skip", place=place))
        assert torch.equal(found[:8], plain([*ALL_RIGHT, *MIXED])[:8])
        assert not torch.equal(found[8:], plain(MIXED))


def test_skipped_groups_come_back_without_a_jump() -> None:
    """Lengths 2, 4, 2, 2: P is 0.05 of the second, 0.0375 from the mean, times 0 to 1 as rounding explains less."""
    shifts = []
    for steps in range(65):
        score = 1.0 - steps * 2.0**-24
        view = make_batch([("a", 2, score), ("a", 4, 1.0), ("a", 2, 1.0), ("a", 2, 1.0)])
        made = penalty("reference", reference=2, coefficient=0.05, zero_variance="skip")
        made.begin(OmegaConf.create({"algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}}))
        made.shape_rewards(view, view.scores)
        shaped = made.shape_advantages(view, torch.zeros_like(view.scores))
        shifts.append(0.0 if shaped is None else -float(shaped[1, 0]))
    assert (shifts[0], shifts[-1]) == pytest.approx((0.0, 0.0375))
    assert max(abs(b - a) for a, b in itertools.pairwise(shifts)) < 0.003


@pytest.mark.parametrize("place", ["after", "before"])
def test_without_a_penalty_advantages_are_verls_to_the_bit(place: str) -> None:
    for made in (
        penalty("none"),
        penalty("anchor", place=place),
        penalty("group", place=place, warmup={"from_step": 1}),
    ):
        assert torch.equal(shape(make_batch([*ALL_RIGHT, *MIXED]), made), plain([*ALL_RIGHT, *MIXED]))


def test_the_anchor_acts_from_the_step_on_that_freezes_it() -> None:
    """8 right answers of 4 to 11 tokens: A = 7.5, P = 0.3 (T - 7.5) / 7.5 of those above it."""
    made = penalty("anchor", coefficient=0.3, anchor={"min_samples": 16, "pass_rate": 0.9})
    assert torch.equal(shape(make_batch(ALL_RIGHT), made), plain(ALL_RIGHT))
    found = shape(make_batch(ALL_RIGHT, step=2), made)
    lost = torch.tensor([0.0, 0, 0, 0, 0.5, 1.5, 2.5, 3.5]).double() * 0.3 / 7.5
    torch.testing.assert_close(found, lost.mean() - lost, atol=1e-6, rtol=0)
    metrics = made.metrics()
    assert (metrics["length/anchor/frozen"], metrics["length/anchor/new"]) == (1.0, 1.0)
    assert (metrics["length/anchor/mean"], metrics["length/anchor/over_share"]) == (7.5, 0.5)


def test_an_anchor_of_the_source_pools_prompts() -> None:
    rows: Rows = [("a", 4, 1.0), ("a", 4, 1.0), ("b", 8, 1.0), ("b", 8, 1.0)]
    made = penalty("anchor", anchor={"min_samples": 4, "per": "source"})
    shape(make_batch(rows, data_source=["math"] * 4), made)
    assert made.anchors.length_of("math") == 6.0


def test_reference_lengths_are_tokens_or_a_column() -> None:
    by_column = make_batch(MIXED, extra_info=[{"budget": 4}] * 4)
    found = shape(by_column, penalty("reference", reference="extra_info.budget", coefficient=0.5))
    assert torch.equal(found, shape(make_batch(MIXED), penalty("reference", reference=4, coefficient=0.5)))
    assert not torch.equal(found, plain(MIXED))
    gap = make_batch(MIXED, extra_info=[{"budget": 4}, {"budget": 4}, {}, None])
    with pytest.raises(ValueError, match=r"the extra_info of sequence 2 in step 1 is {}, and has no length"):
        shape(gap, penalty("reference", reference="extra_info.budget"))


def test_most_and_applies_to() -> None:
    capped = penalty("uniform", coefficient=1.0, most=0.5)
    assert float(shape(make_batch(ALL_RIGHT), capped).abs().max()) < 1e-7  # all at the cap, and alike
    found = penalties.measure(
        "l", penalty("uniform", applies_to="correct").length, capped.anchors, make_batch(MIXED), None
    )
    assert found.penalty.tolist() == pytest.approx([2e-4, 0.0, 6e-4, 0.0])


def test_tool_tokens_and_padding_are_no_length() -> None:
    view = make_batch(MIXED)
    view.batch.batch["attention_mask"][:, 2:] = 1  # tool tokens behind the answer
    view.batch.batch["responses"][view.batch.batch["response_mask"] == 0] = 49
    sessions = read_sessions(view, most_tokens=12)
    assert sessions.tokens.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert sessions.truncated.tolist() == [True] * 4
    assert torch.equal(shape(view, penalty("group")), shape(make_batch(MIXED), penalty("group")))


def test_rejected_rows_have_no_part() -> None:
    """Row 1 has left its group: the others are as in a group of three."""
    view = make_batch(MIXED)
    view.regroup(["b", "b/rejected-1", "b", "b"], [False, True, False, False])
    found = shape(view, penalty("group", coefficient=0.4))
    three = shape(make_batch([MIXED[0], MIXED[2], MIXED[3]]), penalty("group", coefficient=0.4))
    torch.testing.assert_close(found[[0, 2, 3]], three, atol=0, rtol=0)


@pytest.mark.parametrize("place", ["after", "before"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize(("by_std", "kind"), [(True, "group"), (False, "uniform")])
def test_the_proof_passes_and_says_so(
    place: str, estimator: str, by_std: bool, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = penalty(kind, place=place, estimator=estimator, by_std=by_std, coefficient=0.02)
    view = make_batch([*ALL_RIGHT, *MIXED, ("alone", 5, 1.0), ("short", 3, 0.0), ("short", 3, 0.0)])
    shape(view, made, name=estimator, by_std=by_std)
    with caplog.at_level("INFO"):
        found = judge(made, view)
    assert found["length/live/proved"] == 1.0
    assert found["length/live/changed_rows"] >= 12
    assert caplog.text.count("length penalty LIVE on") == 1
    assert 0 < made.metrics()["length/penalty/share_of_advantage"] < 1


def estimate_anew(data: TensorDict) -> None:
    data["advantages"] = data["advantages"] + 0.01 * data["response_mask"]


def lose_a_row(data: TensorDict) -> None:
    data["response_mask"][0] = 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (estimate_anew, "12 missing or changed .* 12 not sent with this content"),
        (lose_a_row, r"12 of 12 rows expected, 11 seen: 1 missing or changed \(0\)"),
    ],
)
def test_other_advantages_in_the_loss_stop_the_run(change: Any, said: str) -> None:
    made, view = penalty("group"), make_batch([*ALL_RIGHT, *MIXED])
    shape(view, made)
    with pytest.raises(LivenessError, match=said):
        judge(made, view, change)


def test_a_formula_that_went_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = penalties.penalties
    monkeypatch.setattr(penalties, "penalties", lambda *args, **kwargs: -right(*args, **kwargs))
    with pytest.raises(LivenessError, match=r"group a, rollout 0, advantages are lowered by 0\.05"):
        shape(make_batch(ALL_RIGHT), penalty("group"))
    with pytest.raises(LivenessError, match=r"rewards are lowered by 0\.05"):
        shape(make_batch(ALL_RIGHT), penalty("group", place="before"))


def test_rows_that_do_not_change_although_they_must_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made, view = penalty("group"), make_batch(ALL_RIGHT)
    shape(view, made)
    made._changed = 0
    with pytest.raises(
        LivenessError, match=r"no sequence's advantages were changed, but some must change \(group a, rollout 0: 0 "
    ):
        judge(made, view)


def test_an_estimator_that_does_not_see_the_lowered_rewards_is_found() -> None:
    made, view = penalty("group", place="before"), make_batch(ALL_RIGHT)
    raw = view.scores.clone()

    def blind() -> None:
        view.batch.batch["token_level_rewards"] = raw
        estimate(view)()

    with pytest.raises(
        LivenessError, match="group a, rollout 0, the advantage that grpo computed from the lowered rewards is 0"
    ):
        AddOns([made]).compute_advantages(view, blind)


def test_a_checkpoint_carries_the_anchors(tmp_path: Path) -> None:
    settings = {"anchor": {"min_samples": 8, "pass_rate": 0.9}, "coefficient": 0.3}
    first = penalty("anchor", **settings)
    shape(make_batch(ALL_RIGHT), first)
    state = json.loads(json.dumps(first.state(tmp_path / "length_penalty")))
    assert state == {"anchors": 1}
    again, anew = penalty("anchor", **settings), penalty("anchor", **settings)
    again.restore(state, tmp_path / "length_penalty")
    long: Rows = [("a", 9, 1.0), ("a", 12, 1.0)]
    assert torch.equal(shape(make_batch(long, step=2), again), shape(make_batch(long, step=2), first))
    assert not torch.equal(shape(make_batch(long, step=2), first), shape(make_batch(long, step=2), anew))
    (tmp_path / "length_penalty" / length_penalty.FILE).unlink()
    with pytest.raises(CheckpointError, match="records 1 anchors"):
        anew.restore(state, tmp_path / "length_penalty")


def test_answers_that_were_cut_off_and_count_as_right_are_said(caplog: pytest.LogCaptureFixture) -> None:
    made = penalty("none")
    for _ in range(2):
        shape(make_batch([("a", 12, 1.0), ("a", 3, 1.0)]), made)
    assert caplog.text.count("1 answers were cut off at data.max_response_length") == 1
    assert made.metrics()["length/truncated_share"] == 0.5
