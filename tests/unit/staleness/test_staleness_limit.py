"""Prompts issued with a staleness limit, a limit that adapts and is resumed, and the rows of each update."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.batch.declared_keys import read_shipped_defaults
from recipe.offpolicy.batch.plan import BatchSplit
from recipe.offpolicy.batch.weight_versions import CHUNKS
from recipe.offpolicy.staleness.ages import StalenessError
from tests.support.bounded_run import LONG, Run
from tests.support.examples import at_most

pytestmark = pytest.mark.verl("==0.9.1")

pytest.importorskip("transfer_queue")

STEPS = 14


def tenth(number: int, times: int) -> int:
    """One prompt of ten takes 12 steps."""
    return 12 if number % 10 == 3 else 0


def rarely(number: int, times: int = 0) -> int:
    """One prompt of twenty takes 6 steps; these are so few that the others do not wait for room."""
    return 6 if number % 20 == 3 else 0


@pytest.mark.parametrize("eta", [0, 0.5, 2])
@pytest.mark.parametrize("delay", [lambda number, times: 0, tenth], ids=["even", "stragglers"])
def test_waiting_reaches_eta(eta: float, delay: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, eta=eta, delay=delay)
    run.train(STEPS)
    assert max(run.ages()) == math.ceil(eta)
    assert len(run.trained) == 4 * STEPS
    assert set(Counter(uid for _, uid, _ in run.trained).values()) == {1}
    # Nothing is passed over for good: what is not trained was issued last.
    oldest = 4 * STEPS - int(eta * 4) - 4
    assert {f"u{number}" for number in range(max(oldest, 0))} <= {uid for _, uid, _ in run.trained}
    assert run.limit.rate_limit.account == 4 * STEPS + run.buffer.count_prompts()
    assert run.limit.tally.lost == 0


def test_late_prompts_are_overtaken_until_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts 14 and 15 of step 2 may be trained until step 5, whose first two prompts are still others."""
    run = Run(monkeypatch, eta=2.5, delay=lambda number, times: 100 if number in (14, 15) else 0)
    run.train(5)
    last = [uid for step, uid, _ in run.trained if step == 5]
    assert (len(last), set(last[2:])) == (4, {"u14", "u15"})


@settings(max_examples=at_most(100))
@given(
    st.sampled_from([0, 0.5, 1, 2, 3]),
    st.sampled_from(["wait", "mask", "refresh", "drop"]),
    st.sampled_from(["0", "0.5", "1", "3"]),
    st.integers(0, 2**32 - 1),
)
def test_every_schedule_ends_within_the_limit_at_its_issue(eta: float, too_old: str, stride: str, seed: int) -> None:
    """Prompts take 0 to 8 steps, some fail while they are sampled, and eta moves by ``stride``."""
    chance, steps = random.Random(seed), 8
    delays = [chance.choice([0, 0, 0, 1, 2, 8]) for _ in range(10)]
    too_old = too_old if eta else "wait"
    with pytest.MonkeyPatch.context() as patched:
        run = Run(
            patched,
            updates=chance.choice([1, 2, 4]),
            delay=lambda number, times: delays[number % 10],
            eta=eta,
            too_old=too_old,
        )
        for _ in range(steps):
            if too_old != "drop":  # refused next to an eta that moves
                moved = run.limit.rate_limit.eta + chance.choice([-1, 0, 0, 1]) * Fraction(stride)
                run.limit._change_eta(run.step, max(moved, Fraction(0)))
            run.train(1)
            running = sorted(uid for uid, tag in run.queue.tags.items() if tag.get("status") == "running")
            for uid in running[: chance.choice([0, 0, 1, 2])]:
                run.fail(uid)
        waiting, limit = run.buffer.count_prompts(), run.limit.age_limit
    assert len(run.trained) == len({uid for _, uid, _ in run.trained}) == 4 * steps
    assert run.limit.rate_limit.account == 4 * steps + waiting
    exempt = {"wait": (), "drop": (), "refresh": (".2",), "mask": ("",)}[too_old]
    # A row's version is that of the step before its issue.
    assert all(age <= limit.get_oldest(step - age) for step, uid, age in run.trained if not uid.endswith(exempt))


def test_lost_prompts_are_replaced_and_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise, the trainer would wait forever for prompts that no server samples."""
    run = Run(monkeypatch, eta=0)
    run.train(1)
    run.limit.rate_limit.account += 4
    run.train(1)
    assert run.limit.tally.lost == 4
    assert "4 prompts were lost" in caplog.text
    assert max(run.ages()) == 0


def test_a_refreshed_prompt_comes_under_its_own_name_and_at_last_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt 3 takes 4 steps each time, and others take none: it is sampled twice more, and then handed out too old."""
    run = Run(monkeypatch, eta=1, too_old="refresh", delay=lambda number, times: 4 if number == 3 else 0)
    run.train(20)
    (found,) = [(uid, age) for _, uid, age in run.trained if uid.startswith("u3") and uid.partition(".")[0] == "u3"]
    assert found == ("u3.2", 4)
    assert max(age for _, uid, age in run.trained if uid != "u3.2") == 1
    assert run.limit.tally.refreshed == 2
    assert run.limit.rate_limit.account == 4 * 20 + run.buffer.count_prompts()
    assert (run.limit.tally.too_old.total, run.limit.tally.too_old.count) == (2 * 2 * LONG, 4)


def test_dropped_stragglers_are_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, eta=2, too_old="drop", delay=rarely)
    run.train(20)
    assert not [uid for _, uid, _ in run.trained if rarely(int(uid[1:]))]
    assert max(run.ages()) == 2
    assert run.limit.tally.lost == 4
    assert run.limit.tally.too_old.value == LONG
    assert run.limit.rate_limit.account == 4 * 20 + run.buffer.count_prompts()


def test_only_the_wait_for_training_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, times = Run(monkeypatch, eta=2), iter([10.0, 12.5, 20.0, 29.0])
    run.buffer._clock = lambda: next(times)
    monkeypatch.setattr(type(run.buffer).__mro__[1], "wait_for_sampleable", lambda self, *args: (set(), {}))
    run.buffer.wait_for_sampleable(1, "train", 4)
    run.buffer.wait_for_sampleable(1, "val", 4)
    assert run.limit.tally.waited == 2.5


# The limit of staleness as it adapts, and as a checkpoint brings it back


def adapted(monkeypatch: pytest.MonkeyPatch, ess: float, waited: float, **keys: Any) -> Run:
    """A run that adapts eta; its trainer waits this long in each step of 10 seconds, and reports this sample size."""
    run = Run(monkeypatch, adapt=read_shipped_defaults("staleness")["adapt"] | {"ess": 0.9, "every": 2} | keys, eta=0)

    def step(metrics: dict[str, float], timing: Any) -> None:
        run.train(1)
        run.trainer.global_steps -= 1
        run.limit.tally.waited = waited
        metrics["offpolicy/weight/ess"] = ess

    clock = iter(range(0, 10_000, 10))
    run.corrected._run_step = step
    run.limit.clock = lambda: next(clock)
    return run


def take(run: Run, steps: int) -> list[float]:
    """Return the logged eta of each step."""
    etas = []
    for _ in range(steps):
        metrics: dict[str, float] = {}
        run.trainer.step(metrics, {})
        etas.append(metrics["offpolicy/staleness/eta"])
        run.trainer.global_steps += 1
    return etas


def test_eta_moves_by_what_the_step_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run = adapted(monkeypatch, ess=0.95, waited=4.0, ceiling=2)
    with caplog.at_level(logging.INFO):
        assert take(run, 8) == [0, 0, 1, 1, 2, 2, 2, 2]
    assert "offpolicy.staleness.eta: 0 -> 1 from the next step on: an ESS of 0.9500 in 2 step(s)" in caplog.text
    assert "the trainer waited 40.0%" in caplog.text
    assert max(run.ages()) == 2
    assert run.limit.tally.issued == 4
    idle = adapted(monkeypatch, ess=0.95, waited=0.4)
    assert take(idle, 8) == [0] * 8


def test_a_resumed_run_goes_on_with_its_eta(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = adapted(monkeypatch, ess=0.95, waited=4.0)
    take(before, 3)
    saved = json.loads(json.dumps(before.limit.rate_limit_state))
    assert (saved["eta"], saved["account"], saved["changes"]) == ("1", 16, [[0, "0"], [3, "1"]])
    more = take(before, 2)
    run = adapted(monkeypatch, ess=0.95, waited=4.0)
    with caplog.at_level(logging.WARNING):
        run.limit._resume(3, 4, saved)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (run.limit.rate_limit.eta, run.limit.rate_limit.room(4)) == (1, 4)
    assert [run.limit.age_limit.get_oldest(issued) for issued in (2, 3, 4)] == [0, 1, 1]
    run.limit.rate_limit.account -= 4  # those of before are not in this queue
    run.trainer.global_steps = 4
    assert take(run, 2) == more == [1, 2]


def test_other_keys_restart_eta(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = adapted(monkeypatch, ess=0.95, waited=4.0)
    take(before, 3)
    run = adapted(monkeypatch, ess=0.95, waited=4.0, patience=5)
    run.limit._resume(3, 4, before.limit.rate_limit_state)
    assert "eta restarts at 0" in caplog.text
    assert "offpolicy.staleness.adapt.patience: 2 in the checkpoint, 5 now" in caplog.text
    assert "resuming with offpolicy.staleness.eta=0, but the checkpoint was trained with 1" in caplog.text
    assert [run.limit.age_limit.get_oldest(issued) for issued in (2, 3, 4)] == [0, 1, 0]


# Resumed runs ---------------------------------------------------------------------------------------------------


def test_a_resumed_run_counts_what_came_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After step 3 with eta 2, 8 prompts wait; the next step has room for 4, as without the interruption."""
    before = Run(monkeypatch, eta=2)
    before.train(3)
    saved = before.limit.rate_limit_state
    assert saved == {"eta": "2", "account": 20}
    run = Run(monkeypatch, eta=2)
    with caplog.at_level(logging.WARNING):
        run.limit._resume(3, 8, saved)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert run.limit.rate_limit.room(4) == 4
    run.limit._resume(3, 6, saved)
    assert "2 prompts were waiting when the checkpoint was saved, but were not restored" in caplog.text


@pytest.mark.parametrize(("step", "account", "room"), [(0, 0, 12), (3, 20, 4)])
def test_what_verl_has_loaded_is_counted(step: int, account: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.staleness import staleness_limit

    run = Run(monkeypatch, eta=2)
    run.trainer.global_steps, run.trainer._restored_tq_prompt_count = step, 8
    monkeypatch.setattr(run.corrected, "_check_resumed", lambda: None)
    run.corrected.verls._load_checkpoint = lambda: "what verl returns"
    monkeypatch.setattr(staleness_limit, "read_staleness", lambda config: {"eta": "2", "account": 20})
    assert run.trainer._load_checkpoint() == "what verl returns"
    assert run.limit.rate_limit.account == account
    assert run.limit.rate_limit.room(step + 1) == room
    assert run.limit.age_limit.get_oldest(step) == run.limit.age_limit.get_oldest(step + 1) == 2


# Updates under a limit of staleness: the rows that enter the loss, and lies that stop the run


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Update:
    """One update, in step 5, of four rows of 2 tokens that ``versions`` sampled, with two rows per mini-batch."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, versions: list[int], seen: float | None, **staleness: Any
    ) -> None:
        run = Run(monkeypatch, **staleness)
        self.trainer, self.limit, self.corrected = run.trainer, run.limit, run.corrected
        self.trainer.parameter_sync_step = 1
        self.trainer.global_steps = 5
        ones = [torch.ones(2, dtype=torch.int64) for _ in versions]
        self.store: dict[str, Any] = {
            "response_mask": nested(ones),
            "loss_mask": nested(ones),
            "advantages": nested([torch.full((2,), 1.5) for _ in versions]),
            "responses": nested(ones),
            "rollout_log_probs": nested([torch.zeros(2) for _ in versions]),
        }
        keys = [f"u{i}_0_0" for i in range(len(versions))]
        tags = [{"min_global_steps": v, "global_steps": v + 1, "response_len": 2} for v in versions]
        self.batch = SimpleNamespace(keys=keys, tags=tags, partition_id="train", extra_info={})
        queue = SimpleNamespace(
            kv_batch_get=lambda keys, partition_id, select_fields: {name: self.store[name] for name in select_fields},
            kv_batch_put=lambda keys, partition_id, fields: self.store.update(fields.items()) or self.batch,
        )
        for name in ("kv_batch_get", "kv_batch_put"):
            monkeypatch.setattr(f"transfer_queue.{name}", getattr(queue, name))
        self.in_loss: dict[str, list[list[float]]] = {}
        self.sampled: list[Any] = []
        self.corrected.supervision = SimpleNamespace(
            begin=lambda: None,
            metrics=lambda: {} if seen is None else {"offpolicy/staleness/max": seen},
            wants_sampled=True,
            sampled=lambda rows: self.sampled.append([row.tolist() for row in rows["response_mask"].unbind()]),
        )
        monkeypatch.setattr(self.corrected, "_with_plan", lambda batch: batch)
        monkeypatch.setattr(self.corrected, "split_batch", lambda: BatchSplit(1, 2, "token-mean"))
        monkeypatch.setattr(self.corrected, "_score", lambda batch, metrics: batch)
        self.corrected.verls._update_actor = lambda batch, metrics: self._update(batch)

    def _update(self, batch: Any) -> Any:
        for name in ("response_mask", "loss_mask", "advantages"):
            self.in_loss[name] = [row.tolist() for row in self.store[name].unbind()]
        return batch

    def check(self) -> None:
        """Check the rows as they were sampled."""
        self.trainer._compute_old_log_prob(self.batch, {})

    def run(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        self.trainer._update_actor(self.batch, metrics)
        return metrics


def test_ages_of_rows_are_split_into_flight_and_queue_and_counted_in_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 5 makes two updates: 8 tokens of mean age 1 in the first, and 8 of mean age 0.5 in the second. With two
    updates per version, this is (8 * 2 + 8 * (1 + 1)) / 16 updates.
    """
    update = Update(monkeypatch, [4, 3, 4, 3], seen=1.0, eta=1)
    update.batch.tags[1]["max_global_steps"] = 4
    update.batch.tags[2] |= {"min_global_steps": 0, "max_global_steps": 0, "is_padding": True}
    update.trainer.parameter_sync_step = 2
    for mean in (1.0, 0.5):
        counts = {"offpolicy/staleness/is0/token_count": 3.0, "offpolicy/staleness/is1/token_count": 5.0}
        metrics = {"offpolicy/staleness/max": 1.0, "offpolicy/staleness/mean": mean, **counts}
        monkeypatch.setattr(update.corrected.supervision, "metrics", lambda metrics=metrics: metrics)
        update.run()
    tally = update.limit.tally.metrics(1, 0.0)
    # Rows (4, 4), (3, 4) and (3, 3) of version 4's step, twice.
    assert tally["offpolicy/staleness/in_flight"] == pytest.approx(1 / 3)
    assert tally["offpolicy/staleness/in_queue"] == pytest.approx(1 / 3)
    assert tally["offpolicy/staleness/updates_mean"] == 2.0
    update.store["extra_fields"] = [
        {CHUNKS: [[(4, 2)]]},
        {CHUNKS: [[(3, 1), (4, 1)]]},
        {CHUNKS: [[(0, 1), (2, 1)]]},
        {},
    ]
    update.batch.tags[2]["global_steps"] = 1
    update.check()
    assert update.limit.tally.metrics(1, 0.0)["offpolicy/staleness/spans"] == 1.5


def test_a_row_past_the_limit_stops_the_run_with_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if a buffer or a server ignores eta."""
    update = Update(monkeypatch, [4, 2, 4, 1], seen=3.0, eta=1)
    message = (
        r"sequence u3_0_0 is too old: .* in step 5, .* version 4, its age is 3\. .* age is 1, .*eta was 1 .* 2 of 4"
    )
    with pytest.raises(StalenessError, match=message):
        update.run()
    assert update.in_loss == {}


def test_a_masked_row_leaves_the_loss_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are removed from the loss's count, and its mu from the checksums; verl's metrics include all rows."""
    update = Update(monkeypatch, [4, 2, 4, 4], seen=0.0, eta=1, too_old="mask")
    update.run()
    without = [[1, 1], [0, 0], [1, 1], [1, 1]]
    assert update.in_loss == {"response_mask": without, "loss_mask": without, "advantages": [[1.5, 1.5]] * 4}
    assert update.sampled == [without]
    assert [row.tolist() for name in ("response_mask", "loss_mask") for row in update.store[name].unbind()] == [
        [1, 1]
    ] * 8
    tally = update.limit.tally.metrics(1, 0.0)
    assert tally["offpolicy/staleness/masked_token_share"] == 0.25
    assert tally["offpolicy/staleness/length_ratio"] == 1.0


@pytest.mark.parametrize(
    ("seen", "message"), [(1.0, "a sequence of age 1"), (None, r"received no versions, .* u0_0_0, has age 0")]
)
def test_older_rows_in_the_loss_stop(seen: float | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StalenessError, match=message):
        Update(monkeypatch, [4, 4, 4, 4], seen=seen, eta=2).run()


# Sabotage --------------------------------------------------------------------------------------------------------


def test_a_server_that_tells_the_version_after_its_own_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, eta=2)
    run.train(2)
    monkeypatch.setattr(run, "newest", lambda uid: run.step)
    message = r"sequence u\d+_0_0 finished in step 3 and reports that version 3 .* version 2 is the newest .*eta=2"
    with pytest.raises(StalenessError, match=message):
        run.train(1)


def test_a_lie_about_rows_that_finish_during_an_update_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the next step, the version would exist, and the row would seem one version younger than it is."""
    run = Run(monkeypatch, eta=1)
    row = {"status": "success", "global_steps": 1, "min_global_steps": 0, "max_global_steps": 1, "response_len": 5}
    put = run.queue.tags.update
    run.corrected._run_step = lambda metrics, timing: put({"u7_0_0": row})
    with pytest.raises(StalenessError, match="sequence u7_0_0 finished in step 1"):
        run.trainer.step({}, {})
    row["max_global_steps"] = 0
    run.trainer.step({}, {})


def of_four_rows(monkeypatch: pytest.MonkeyPatch, last: dict[str, Any], **tag: Any) -> Update:
    """An update of rows of version 4 and 2 tokens; the last row has this note and these tags."""
    update = Update(monkeypatch, [4, 4, 4, 4], seen=0.0, eta=2)
    update.store["extra_fields"] = [{CHUNKS: [[(4, 2)]]}] * 3 + [last]
    update.batch.tags[3] |= tag
    return update


@pytest.mark.parametrize("noted", [{CHUNKS: [[(3, 1), (4, 1)]]}, {}])
def test_a_server_that_tells_an_older_version_stops(noted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last prompt was issued in step 5, with version 4. If there are chunks, they count, because an attempt that
    was aborted before its first token may have used a server that had not yet loaded the weights.
    """
    update = of_four_rows(monkeypatch, noted, global_steps=5, min_global_steps=3)
    message = r"sequence u3_0_0 of step 5 reports that version 3 .* issued in step 5, under version 4 .*eta=2"
    with pytest.raises(StalenessError, match=message):
        update.check()
    update = of_four_rows(monkeypatch, noted, global_steps=4, min_global_steps=3)
    update.check()
    empty = of_four_rows(monkeypatch, {CHUNKS: [[(4, 2)]]}, global_steps=5, min_global_steps=3)
    empty.check()


def test_a_client_that_drops_a_chunk_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    update = of_four_rows(monkeypatch, {CHUNKS: [[(4, 1)]]})
    message = r"sequence u3_0_0 of step 5 has 2 tokens, .* 1 of them .*eta=2, chunks \[\[\(4, 1\)\]\].*lost a chunk"
    with pytest.raises(StalenessError, match=message):
        update.check()
    update.batch.tags[3]["is_padding"] = True
    update.check()
