"""Both halves of on-policy distillation: a batch of six rows, a teacher over HTTP, and the worker's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.opd import distillation
from recipe.offpolicy.extensions.opd.signal import FACTOR, ROW, TEACHER
from recipe.offpolicy.extensions.opd.teacher_client import TeacherClient, TeacherError
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.loss import OffPolicyLoss
from tests.support import training_worker as tw
from tests.support.corrections import TIS
from tests.support.distilled import ELIGIBLE, Run, drop, opinion, permute, round_off
from tests.support.fake_teacher import FakeTeacher, serving


@pytest.fixture
def teacher() -> Iterator[FakeTeacher]:
    with serving(FakeTeacher(score=opinion)) as serves:
        yield serves


NONE, WEIGHTED = CorrectionSpec(), CorrectionSpec.from_mapping({"weight": TIS})
NESTED = pytest.mark.verl(">=0.8")
"""Releases whose own loss accepts columns that are nested by row."""


def test_only_eligible_rows_are_asked_about_and_each_token_gets_its_own_log_prob(teacher: FakeTeacher) -> None:
    run = Run(teacher.url, "advantage")
    eligible = [[*prompt, *response] for prompt, response in run.batch.token_ids[:2]]
    assert sorted(teacher.asked) == sorted(eligible * 2)  # both once more, each alone
    shipped = run.batch.put_columns
    assert shipped[ROW].tolist() == [1, 1, 0, 0, 0, 0]
    for row in range(6):
        prompt, response = run.batch.token_ids[row]
        wanted = opinion([*prompt, *response])[len(prompt) - 1 :]
        for place, on in enumerate(run.made.response_mask[row].tolist()):
            found = float(shipped[TEACHER][row, place])
            if row in ELIGIBLE and on:
                assert found == pytest.approx(wanted[place])
            else:
                assert math.isnan(found)


@NESTED
@pytest.mark.parametrize("spec", [NONE, WEIGHTED], ids=["none", "tis"])
def test_the_loss_gains_coef_times_the_bounded_gap(spec: CorrectionSpec, teacher: FakeTeacher) -> None:
    """In float64: coef w clip(s - t) / tokens at each token of eligible rows, and 0 elsewhere."""
    run = Run(teacher.url, "loss", coef=0.25, max_gap=1.0)
    with_term, packet = run.update(spec)
    run.opd.opd.__dict__["coef"] = 1e-12
    without, _ = run.update(spec)
    tokens = sum(int(mask.sum()) for mask in run.made.response_mask)
    for row, (found, plain) in enumerate(zip(run.by_token(with_term), run.by_token(without), strict=True)):
        s, mu = run.made.old_log_probs[row].double(), run.made.rollout_log_probs[row].double()
        t = run.batch.put_columns[TEACHER][row][: len(s)].double()
        weight = (s - mu).exp().clamp(max=TIS["upper"]) if spec.weight else torch.ones_like(s)
        wanted = torch.where(
            run.made.response_mask[row].bool() & (row in ELIGIBLE), 0.25 * weight * (s - t).clamp(-1, 1) / tokens, 0.0
        )
        torch.testing.assert_close((found - plain).double(), wanted.nan_to_num(), atol=2e-7, rtol=1e-4)
    assert run.judge(packet)["opd/live/error"] < 1e-4


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_the_proof_passes_and_says_so_once(mode: str, teacher: FakeTeacher, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(teacher.url, mode)
    _, packet = run.update(WEIGHTED, prove=True)
    assert packet.proof is not None
    assert packet.proof.gradient_error is not None
    assert packet.proof.gradient_error < 1e-4
    with caplog.at_level("INFO"):
        found = run.judge(packet)
        run.judge(packet)
    tokens = sum(int(run.made.response_mask[row].sum()) for row in ELIGIBLE)
    assert caplog.text.count(f"opd {mode} LIVE on 2 sequences, {tokens} tokens") == 1
    assert found["opd/live/proved"] == 1.0
    assert found["opd/num_eligible_samples"] == 2.0
    assert found["opd/frac_tokens_with_kd"] == tokens / sum(int(row.sum()) for row in run.made.response_mask)
    assert 0 < found["opd/share_of_loss"] < 1


def forget(data: TensorDict) -> None:
    data[ROW] = torch.zeros_like(data[ROW])


def forget_factor(data: TensorDict) -> None:
    data[FACTOR] = torch.ones_like(data[FACTOR])


def estimate_anew(data: TensorDict) -> None:
    data["advantages"] = torch.nested.as_nested_tensor(
        [torch.ones_like(row) for row in data["advantages"].unbind()], layout=torch.jagged
    )


@pytest.mark.parametrize(
    ("mode", "fault", "said"),
    [
        ("advantage", drop, "offpolicy_opd_teacher did not reach the loss"),
        ("advantage", round_off, "as float32 .it is torch.bfloat16. did not reach"),
        ("advantage", permute, "2 of 2 rows expected, 2 seen: 1 missing or changed .b., 1 were not sent"),
        ("loss", forget, "2 of 2 rows expected, 0 seen"),
        ("advantage", estimate_anew, "the advantages in the loss are not coef"),
        ("advantage", forget_factor, "the advantages in the loss are not coef"),
    ],
)
def test_each_fault_on_the_way_stops_the_run(
    mode: str, fault: Callable[[TensorDict], None], said: str, teacher: FakeTeacher
) -> None:
    run = Run(teacher.url, mode, coef=0.5, schedule=plan("step", 0, 2))
    _, packet = run.update(WEIGHTED, fault)
    with pytest.raises(LivenessError, match=said):
        run.judge(packet)


def test_a_column_that_the_loss_needs_and_lacks_stops_before_the_backward_pass(teacher: FakeTeacher) -> None:
    with pytest.raises(LivenessError, match="offpolicy_opd_teacher did not reach the loss"):
        Run(teacher.url, "loss").update(WEIGHTED, drop)


def test_a_term_that_ignores_the_teacher_is_found(teacher: FakeTeacher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The term is K1 as a loss."""
    from recipe.offpolicy.extensions.opd import signal

    def k1(student: Tensor, teacher: Tensor, mask: Tensor, *, max_gap: float) -> Tensor:
        return torch.where(mask, student - teacher, 0.0)

    monkeypatch.setattr(signal, "k2_loss", k1)
    run = Run(teacher.url, "loss")
    _, packet = run.update(WEIGHTED)
    with pytest.raises(LivenessError, match="the gradient does not depend on the teacher"):
        run.judge(packet)


def test_a_session_of_several_outputs_counts_once_and_is_taught_whole(teacher: FakeTeacher) -> None:
    run = Run(teacher.url, "advantage")
    run.batch.sessions = ("a", "a", "c", "d", "e", "f")
    mask = run.batch.rows("response_mask")["response_mask"].bool()
    assert run.opd._find_eligible(run.batch, mask).tolist() == [False] * 6  # one of two passes
    run.batch.uids = ("hard", "hard", "easy", "easy", "easy", "easy")
    assert run.opd._find_eligible(run.batch, mask).tolist() == [True, True, False, False, False, False]


@NESTED
def test_none_eligible(teacher: FakeTeacher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "IDLE", 2)
    taught = Run(teacher.url, "advantage")
    taught.judge(taught.update(NONE)[1])
    teacher.asked.clear()
    run = Run(teacher.url, "advantage", eligible={"passed_above": -1.0})
    assert teacher.asked == []
    assert torch.equal(run.advantages, run.base)
    _, packet = run.update(NONE)
    for _ in range(3):
        found = run.judge(packet)
    assert found["opd/num_eligible_samples"] == found["opd/live/proved"] == 0.0
    assert math.isnan(found["opd/k1"])
    assert "no rollout was eligible" in str(run.opd.unproved())
    assert caplog.text.count("opd has no effect: no rollout was eligible in 2 updates") == 1
    assert run.opd.metrics().keys() == taught.opd.metrics().keys()
    assert found.keys() == taught.judge(taught.update(NONE)[1]).keys()


def test_a_dominant_teacher_is_said_with_the_factor_that_halves_it(
    teacher: FakeTeacher, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(teacher.url, "loss", coef=1.0)
    for share in (0.95, 0.5, 0.95, 0.95, 0.95, 0.95):
        run.opd._watch(share)
    assert caplog.text.count("the teacher's share of the loss's gradient was 95 % for 3 updates") == 1
    assert "opd.coef=0.053" in caplog.text


def test_scale_travels_with_the_rows(teacher: FakeTeacher) -> None:
    run = Run(teacher.url, "advantage", scale="std", horizon=2)
    factor = run.batch.put_columns[FACTOR]
    assert factor.unique().numel() == 1
    assert run.opd.metrics()["opd/scale"] == pytest.approx(1 / float(factor[0]))
    _, packet = run.update(WEIGHTED)
    assert run.judge(packet)["opd/live/error"] < 1e-5
    near = ~torch.isnan(run.batch.put_columns[TEACHER])
    assert near.sum(-1).tolist() == [2, 2, 0, 0, 0, 0]
    beyond = pad_sequence(run.made.response_mask, batch_first=True).bool() & ~near
    assert bool((run.advantages[:2][beyond[:2]] == 0).all())


def plan(by: str, start: float, end: float, final: float = 0.0) -> dict[str, Any]:
    return {"by": by, "start": start, "end": end, "final": final}


@pytest.mark.parametrize("mode", ["advantage", "loss"])
@pytest.mark.parametrize("by", ["step", "pass_rate", "gap"])
def test_a_scheduled_coefficient_is_proved_like_a_smaller_one(mode: str, by: str, teacher: FakeTeacher) -> None:
    """Three of six rollouts pass. Halfway through the schedule, the update is that of half the coefficient; at 0, it is
    that of no coefficient.
    """
    constant = Run(teacher.url, mode, step=5, coef=0.5)
    middle = {"step": 5.0, "pass_rate": 0.5, "gap": constant.opd.metrics()["opd/gap/abs_mean"]}[by]
    run = Run(teacher.url, mode, step=5, coef=1.0, schedule=plan(by, middle - 1, middle + 1))
    (wanted, _), (found, packet) = constant.update(WEIGHTED), run.update(WEIGHTED, prove=True)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(run.advantages[2:], run.base[2:])
    assert packet.proof is not None
    assert (packet.proof.gradient_error or 0.0) < 1e-4
    told = run.judge(packet)
    assert told["opd/kd_coef"] == pytest.approx(0.5)
    assert told["opd/live/error"] < 1e-4
    none = Run(teacher.url, mode, step=5, schedule=plan(by, middle - 2, middle - 1))
    assert torch.equal(none.advantages, none.base)
    assert none.batch.put_columns[ROW].sum() == 0
    _, packet = none.update(WEIGHTED)
    told = none.judge(packet)
    assert (told["opd/kd_coef"], told["opd/num_eligible_samples"]) == (0.0, 0.0)
    assert none.opd.unproved() is not None


def test_each_data_source_has_its_teacher_and_one_without_has_none(teacher: FakeTeacher) -> None:
    """Rows 0 and 1 are eligible: the first is about words, the second about sums."""
    sources = ("words", "sums", *["other"] * 4)
    with serving(FakeTeacher(score=lambda ids: [each - 1 for each in opinion(ids)])) as second:
        own = {"sources": {"sums": {"url": second.url, "probe_every": None}}}
        run = Run(teacher.url, "advantage", sources=sources, teacher={"url": teacher.url, **own})
        rows = [[*prompt, *response] for prompt, response in run.batch.token_ids[:2]]
        assert (teacher.asked, second.asked) == ([rows[0]] * 2, [rows[1]])
        for row, less in ((0, 0.0), (1, 1.0)):
            prompt, _ = run.batch.token_ids[row]
            on = run.made.response_mask[row].bool()
            wanted = torch.tensor(opinion(rows[row])[len(prompt) - 1 :])[on] - less
            torch.testing.assert_close(run.batch.put_columns[TEACHER][row, : len(on)][on], wanted)
        _, packet = run.update(WEIGHTED)
        assert run.judge(packet)["opd/num_eligible_samples"] == 2.0
        found = run.opd.metrics()
        assert found["opd/source/sums/rows"] == 1.0
        assert found["opd/teacher/tokens"] == sum(map(len, rows))
        gaps = (wanted - run.made.old_log_probs[1][on]).clamp(-run.opd.opd.max_gap, run.opd.opd.max_gap)
        assert found["opd/source/sums/gap_abs_mean"] == pytest.approx(float(gaps.abs().mean()), rel=1e-5)
        alone = Run(teacher.url, "advantage", sources=sources, teacher=own)
        assert alone.batch.put_columns[ROW].tolist() == [0, 1, 0, 0, 0, 0]
        assert torch.equal(alone.advantages[0], alone.base[0])


# A teacher that is none ------------------------------------------------------------------------------------------


class Steps:
    """Several steps of one run, with teachers that change."""

    def __init__(self, url: str, **teacher: Any) -> None:
        self.run = Run(url, "loss", teacher={"url": url, **teacher})

    def take(self, step: int) -> None:
        self.run.batch.step = step
        before = self.run.opd._teachers[""]
        self.run.opd.begin(None)  # type: ignore[arg-type]
        again = self.run.opd._teachers[""]
        again.first, again.probed = before.first, before.probed
        try:
            self.run.opd.on_rollout(self.run.batch)
            self.run.opd.shape_advantages(self.run.batch, self.run.base.clone())
        finally:
            self.run.opd.end()


def test_rows_are_scored_again_after_so_many_steps(teacher: FakeTeacher) -> None:
    steps, asked = Steps(teacher.url, probe_every=3), []
    for step in range(2, 9):
        before = len(teacher.asked)
        steps.take(step)
        asked.append(len(teacher.asked) - before)
    # The batch's 2 rows; at steps 4 and 7 each once more, and the first of the run.
    assert asked == [2, 2, 5, 2, 2, 5, 2]


def test_other_weights_behind_the_same_address_stop_the_run(teacher: FakeTeacher) -> None:
    steps = Steps(teacher.url, probe_every=2)
    teacher.score = lambda ids: [0.8 * value for value in opinion(ids)]
    steps.take(2)
    with pytest.raises(LivenessError, match=r"a sequence of an earlier step .* again: its .* weights have changed"):
        steps.take(3)


def test_rows_mixed_up_within_a_request_stop_the_run(teacher: FakeTeacher, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = TeacherClient.wait
    monkeypatch.setattr(TeacherClient, "wait", lambda client, scoring: wait(client, scoring)[::-1])
    with pytest.raises(
        LivenessError, match=r"sequence [01] was scored again, alone: .* mixes up the rows of a request"
    ):
        Run(teacher.url, "loss")


def test_an_answer_of_another_model_stops_the_run(teacher: FakeTeacher) -> None:
    teacher.answered = "other"
    with pytest.raises(
        TeacherError, match=r"the model 'other', but teacher was requested\. Fix: set opd.teacher.model"
    ):
        Run(teacher.url, "loss")
    teacher.answered = "teacher"
    Run(teacher.url, "loss")
    teacher.models, teacher.answered = ("alias", "teacher"), "alias"
    Run(teacher.url, "loss", teacher={"url": teacher.url, "model": "teacher"})  # of the same root


# verl's own distillation loss and ours, where the two coincide: all rows, no bound, no gate


ALL_ROWS = {"eligible": {"max_pass_rate": 1.0, "rows": "all"}, "max_gap": 1e3}


def verls_gradient(run: Run, **settings: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of verl's ``distillation_ppo_loss`` at the flat log-probs, with the columns that it reads."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import DistillationLossConfig

    config = DistillationLossConfig(loss_max_clamp=None, **settings)
    data = run.data()
    rows = []
    for prompt, response in run.batch.token_ids:
        # That of token i + 1 at i, and a last one that stands for nothing.
        rows.append(torch.tensor([*opinion([*prompt, *response]), 0.0])[:, None])
    data["teacher_logprobs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    leaf = run.flat.clone().requires_grad_()
    offsets = torch.tensor([0, *run.whole]).cumsum(0)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets)}
    distillation: Any = SimpleNamespace(distillation_loss=config)
    loss, _ = distillation_ppo_loss(tw.actor_config(), distillation, output, data)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def our_gradient(run: Run) -> tuple[Tensor, Tensor]:
    leaf = run.flat.clone().requires_grad_()
    offsets = torch.tensor([0, *run.whole]).cumsum(0)
    loss = OffPolicyLoss(CorrectionSpec(), tw.actor_config(), extensions={"opd": run.opd.worker()})
    value, _ = loss({"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets)}, run.data())
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@NESTED
def test_the_loss_is_verls_k2_beside_the_rewards(teacher: FakeTeacher) -> None:
    run = Run(teacher.url, "loss", coef=0.25, corrected=False, **ALL_ROWS)
    value, gradient = our_gradient(run)
    wanted, of_verl = verls_gradient(
        run, loss_mode="k2", use_policy_gradient=False, use_task_rewards=True, distillation_loss_coef=0.25
    )
    torch.testing.assert_close(value, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, of_verl, atol=1e-6, rtol=1e-6)


@NESTED
def test_advantages_are_verls_k1_as_a_policy_gradient(teacher: FakeTeacher) -> None:
    """At pi = pi_old; verl's loss then has no term for the rewards."""
    run = Run(teacher.url, "advantage", coef=1.0, **ALL_ROWS)
    _, gradient = our_gradient(run)
    _, of_verl = verls_gradient(run, loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    torch.testing.assert_close(gradient, of_verl, atol=1e-6, rtol=1e-6)
