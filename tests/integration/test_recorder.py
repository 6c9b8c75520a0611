"""The recorder on a real verl TrainingWorker: the files contain what the loss read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.batch.plan import PLAN, SharedPlan, UpdateRows
from recipe.offpolicy.correction import CorrectionSpec, Statistic
from recipe.offpolicy.correction.statistics import merge_all
from recipe.offpolicy.recording import Recording, Rows, Step, worker_hook
from recipe.offpolicy.recording.recorder import flush_all, get_recorder
from recipe.offpolicy.recording.run import RecordSettings
from recipe.offpolicy.recording.worker_hook import is_chosen
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import take_packets
from tests.support import training_worker as tw
from tests.support.recorder_clock import Clock
from tests.support.specs import STACK
from verl.utils import tensordict_utils as tu

pytestmark = pytest.mark.usefixtures("recorder_clock")

ROWS, STEP = 8, 5
SPEC = CorrectionSpec.from_mapping(STACK)
VERSIONS = [3, 3, 4, 4, 4, 4, 2, 2]


@pytest.fixture
def worker(engine_factory: Any) -> Any:
    """A worker for one test, because the optimizer steps."""
    return engine_factory()


class Watched(OffPolicyLoss):
    """The loss, which keeps copies of its inputs and of the values that it passes to verl's loss, per row and call."""

    def __init__(self, directory: Path, spec: CorrectionSpec = SPEC, *, prove: bool = False, **settings: Any) -> None:
        super().__init__(spec, tw.actor_config(), prove=prove, record=RecordSettings.at(str(directory), **settings))
        self.calls: list[list[dict[str, Any]]] = []
        verls = self.base_loss

        def watched(model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
            if self.calls and mb.WEIGHTS in data.keys() and "factor" not in self.calls[-1][0]:
                for row, factor in zip(self.calls[-1], data[mb.WEIGHTS], strict=True):
                    row["factor"] = factor.detach().clone()
            return verls(model_output, data, dp_group)

        self.base_loss = watched

    def __call__(self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
        if torch.is_grad_enabled() and model_output["log_probs"].grad_fn is not None:
            names = ("responses", "response_mask", mb.ROLLOUT_LOG_PROBS, "old_log_probs", "advantages")
            dense = data.select(*names).to_padded_tensor()
            log_prob = mb.pad_log_probs(model_output, data).detach().clone()
            self.calls.append(
                [
                    {name: dense[name][i].clone() for name in names}
                    | {
                        "log_prob": log_prob[i],
                        "uid": str(data["uid"][i]),
                        "prompt": data["prompts"].unbind()[i].clone(),
                    }
                    for i in range(len(data))
                ]
            )
        return super().__call__(model_output, data, dp_group)


def rollout(worker: Any, seed: int = 0) -> tw.Rollout:
    rows = tw.add_log_probs(worker, tw.make_rollout(seed=seed), mismatch=0.2)
    rows.versions = VERSIONS
    return rows


def shipped(rows: tw.Rollout, step: int = STEP, mini_batches: int = 1, **update: int) -> TensorDict:
    """The batch as the V1 trainer ships it, with V1's names of uid and rewards."""
    data = rows.to_tensordict()
    data["uid"] = NonTensorStack(*(f"group-{row // 2}" for row in range(ROWS)))
    scores = [torch.zeros(len(row)) for row in rows.responses]
    for row, score in enumerate(scores):
        score[-1], score[0] = row / 2, 0.25
    data["rm_scores"] = torch.nested.as_nested_tensor(scores, layout=torch.jagged)
    dealt = UpdateRows(ranks=1, rows=ROWS, mini_batch_rows=ROWS // mini_batches)
    tu.assign_non_tensor(data, **{PLAN: SharedPlan(step, update=replace(dealt, **update))})
    return data


def recorded(directory: Path, step: int = STEP) -> Step:
    flush_all()
    return Recording(directory).step(step)


def statistics(metrics: dict[str, Any]) -> dict[str, Statistic]:
    return merge_all(packet.statistics for packet in take_packets(metrics))


def assert_row(rows: Rows, i: int, saw: dict[str, Any], original: int) -> None:
    """Check that row ``i`` of the recording is the row that the loss read, which was row ``original`` of the
    rollout.
    """
    tokens = slice(rows.offsets[i], rows.offsets[i + 1])
    mask = saw["response_mask"].bool()
    width = int(mask.nonzero().max()) + 1
    for name, of_loss in {
        "response_ids": "responses",
        "rollout_log_prob": mb.ROLLOUT_LOG_PROBS,
        "old_log_prob": "old_log_probs",
        "log_prob": "log_prob",
        "advantages": "advantages",
    }.items():
        np.testing.assert_array_equal(getattr(rows, name)[tokens], saw[of_loss][:width].numpy(), err_msg=name)
    np.testing.assert_array_equal(rows.response_mask[tokens], mask[:width].numpy())
    kept = rows.weight[tokens] * (rows.rejected_by[tokens] == 0)
    np.testing.assert_array_equal(np.where(mask[:width], kept, 0), saw["factor"][:width].numpy())
    assert rows.uid[i] == saw["uid"] == f"group-{original // 2}"
    assert rows.reward[i] == original / 2 + 0.25
    assert rows.oldest_version[i] == rows.newest_version[i] == VERSIONS[original]
    assert rows.length[i] == int(mask.sum())
    prompt = rows.prompt_ids[rows.prompt_offsets[i] : rows.prompt_offsets[i + 1]]
    np.testing.assert_array_equal(prompt, saw["prompt"].numpy())


def test_two_gradient_steps_are_recorded_as_the_loss_saw_them(worker: Any, tmp_path: Path) -> None:
    """pi is recorded at the gradient step that used the row, and differs from pi_old at the second step."""
    rows = rollout(worker)
    loss = Watched(tmp_path)
    data = shipped(rows, mini_batches=2)
    tw.update(worker, loss, data, micro_batch_size=2, mini_batches=2)
    step = recorded(tmp_path)
    seen = [row for call in loss.calls for row in call]
    assert len(step.rows) == len(seen) == ROWS
    for i, saw in enumerate(seen):
        assert_row(step.rows, i, saw, original=i)
    assert step.rows.mini_batch.tolist() == [0] * 4 + [1] * 4
    assert set(step.rows.step.tolist()) == {STEP}
    assert step.spec == SPEC.to_mapping()
    assert step.reasons == ("masks.gsm", "masks.opsm")
    assert step.rows.staleness.tolist() == [4 - version for version in VERSIONS]
    # All of it acts on this batch.
    assert (step.rows.rejected_by & 1).any()
    assert (step.rows.rejected_by & 2).any()
    assert step.rows.weight.max() == np.float32(1.2)
    drift = np.abs(step.rows.log_prob - step.rows.old_log_prob)
    at = step.rows.mini_batch[step.rows.row_of_token]
    assert drift[at == 0].max() < 1e-5 < 1e-3 < drift[at == 1].max()


def test_dynamic_micro_batches_are_recorded_in_the_order_of_use(worker: Any, tmp_path: Path) -> None:
    rows = rollout(worker)
    loss = Watched(tmp_path)
    tw.update(worker, loss, shipped(rows), max_token_len=32)
    step = recorded(tmp_path)
    seen = [row for call in loss.calls for row in call]
    assert [row["uid"] for row in seen] != [f"group-{row // 2}" for row in range(ROWS)]  # verl deals them again
    assert len(step.rows) == ROWS
    responses = [row.tolist() for row in rows.responses]
    for i, saw in enumerate(seen):
        own = next(n for n, row in enumerate(responses) if row == saw["responses"].tolist()[: len(row)])
        assert_row(step.rows, i, saw, original=own)


def test_the_proofs_trials_are_not_recorded(worker: Any, tmp_path: Path) -> None:
    loss = Watched(tmp_path, prove=True)
    metrics = tw.update(worker, loss, shipped(rollout(worker)), micro_batch_size=4)
    packets = take_packets(metrics)
    assert all(packet.proof is not None and packet.proof.shifts for packet in packets)
    rows = recorded(tmp_path).rows
    assert len(rows) == ROWS
    assert np.abs(rows.log_prob - rows.old_log_prob).max() < 1e-5


def test_what_has_no_gradient_is_not_recorded(worker: Any, tmp_path: Path) -> None:
    data = shipped(rollout(worker))
    worker.set_loss_fn(Watched(tmp_path))
    worker.engine_config.infer_micro_batch_size_per_gpu = ROWS
    tu.assign_non_tensor(
        data, calculate_entropy=False, compute_loss=True, temperature=1.0, global_token_num=None, global_batch_size=ROWS
    )
    output = worker.infer_batch(data)
    assert "offpolicy" in tu.get(output, "metrics")
    flush_all()
    assert list(tmp_path.iterdir()) == []


def test_a_share_of_the_prompts_is_recorded_whole(worker: Any, tmp_path: Path) -> None:
    """Only the uid decides: some of the four groups of two rows are recorded, and some are not."""
    wanted = [uid for uid in (f"group-{i}" for i in range(4)) if is_chosen(uid, 0.5)]
    assert 0 < len(wanted) < 4
    tw.update(worker, Watched(tmp_path, share=0.5, prompts=False), shipped(rollout(worker)), micro_batch_size=2)
    found = recorded(tmp_path).rows
    assert found.uid.tolist() == [uid for uid in wanted for _ in range(2)]
    assert len(found.prompt_ids) == 0


@pytest.fixture
def packing_takes_time(recorder_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing takes an eighth of a second per micro-batch."""
    pack = worker_hook.pack

    def slow(*args: Any) -> Any:
        recorder_clock.now += 0.125
        return pack(*args)

    monkeypatch.setattr(worker_hook, "pack", slow)


@pytest.mark.usefixtures("packing_takes_time")
def test_what_the_logger_gets(worker: Any, tmp_path: Path, recorder_clock: Clock) -> None:
    """A step of 10 s allows 0.5 s, which its 4 micro-batches take. The number of bytes is in the first report after the
    write.
    """
    loss, rows = Watched(tmp_path), rollout(worker)
    first = statistics(tw.update(worker, loss, shipped(rows, step=1), micro_batch_size=2))
    flush_all()
    recorder_clock.now = 10.0
    second = statistics(tw.update(worker, loss, shipped(rows, step=2), micro_batch_size=2))
    names = {f"record/{name}" for name in ("rows", "dropped_rows", "bytes", "seconds", "stopped")}
    assert {name for name in first if name.startswith("record")} == names
    assert first["record/rows"].value() == second["record/rows"].value() == ROWS
    flush_all()
    assert loss.record is not None
    left = get_recorder(loss.record, rank=0, ranks=1).take().bytes
    files = sorted(tmp_path.glob("*.parquet"))
    assert [file.name for file in files] == [f"step_0000000{step}.rank_00000.parquet" for step in (1, 2)]
    reported = first["record/bytes"].value() + second["record/bytes"].value()
    assert reported >= files[0].stat().st_size
    assert reported + left == sum(file.stat().st_size for file in files)
    assert first["record/stopped"].value() == first["record/dropped_rows"].value() == 0
    assert first["record/seconds"].value() == second["record/seconds"].value() == 0.5


def test_gradients_are_the_same_to_the_bit(engine_factory: Any, tmp_path: Path) -> None:
    worker = engine_factory()
    data = shipped(rollout(worker))
    _, plain = tw.gradients(worker, OffPolicyLoss(SPEC, tw.actor_config()), data, micro_batch_size=4)
    _, watched = tw.gradients(worker, Watched(tmp_path), data, micro_batch_size=4)
    assert tw.equal(plain, watched)


def test_the_loss_travels_to_the_worker_after_it_has_recorded(worker: Any, tmp_path: Path) -> None:
    """The thread is not sent; losses that are handed over again continue to use it."""
    rows = rollout(worker)
    loss = OffPolicyLoss(SPEC, tw.actor_config(), record=RecordSettings.at(str(tmp_path)))
    tw.update(worker, loss, shipped(rows, mini_batches=2), mini_batches=2)
    again = cloudpickle.loads(cloudpickle.dumps(loss))
    tw.update(worker, again, shipped(rows, step=STEP + 1))
    flush_all()
    assert Recording(tmp_path).steps == [STEP, STEP + 1]
