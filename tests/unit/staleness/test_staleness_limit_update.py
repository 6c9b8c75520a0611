"""Updates under a limit of staleness: the rows that enter the loss, and lies that stop the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.batch.plan import BatchSplit
from recipe.offpolicy.batch.weight_versions import CHUNKS
from recipe.offpolicy.staleness.ages import StalenessError
from tests.support.bounded_run import Run

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Update:
    """One update, in step 5, of four rows of 2 tokens that ``versions`` sampled, two rows in each mini-batch."""

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
    updates in a version that is (8 * 2 + 8 * (1 + 1)) / 16 updates.
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
    """As where a buffer or a server takes no notice of eta."""
    update = Update(monkeypatch, [4, 2, 4, 1], seen=3.0, eta=1)
    message = (
        r"sequence u3_0_0 was sampled by version 1 .* in step 5, by version 4, at age 3, .*eta=1, .* allows 1\. 2 of 4"
    )
    with pytest.raises(StalenessError, match=message):
        update.run()
    assert update.in_loss == {}


def test_a_masked_row_leaves_the_loss_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens leave the count of the loss, its mu the checksums; verl's metrics see all rows again."""
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
def test_a_loss_that_sees_older_rows_than_entered_it_stops(
    seen: float | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StalenessError, match=message):
        Update(monkeypatch, [4, 4, 4, 4], seen=seen, eta=2).run()


def test_a_row_without_a_version_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Update(monkeypatch, [4, 4, 4, 4], seen=0.0, eta=2)
    update.batch.tags[2]["min_global_steps"] = None
    with pytest.raises(StalenessError, match=r"sequence u2_0_0 does not name .* agent loop"):
        update.run()


# Sabotage --------------------------------------------------------------------------------------------------------


def test_a_server_that_tells_the_version_after_its_own_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, eta=2)
    run.train(2)
    monkeypatch.setattr(run, "newest", lambda uid: run.step)
    message = r"sequence u\d+_0_0 finished in step 3 and reports that version 3 .* version 2 is the newest .*eta=2"
    with pytest.raises(StalenessError, match=message):
        run.train(1)


def test_a_lie_about_rows_that_finish_during_the_update_is_found_before_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the next step the version would exist, and the row be one version younger than it is."""
    run = Run(monkeypatch, eta=1)
    row = {"status": "success", "global_steps": 1, "min_global_steps": 0, "max_global_steps": 1, "response_len": 5}
    put = run.queue.tags.update
    run.corrected._run_step = lambda metrics, timing: put({"u7_0_0": row})
    with pytest.raises(StalenessError, match="sequence u7_0_0 finished in step 1"):
        run.trainer.step({}, {})
    row["max_global_steps"] = 0
    run.trainer.step({}, {})


def of_four_rows(monkeypatch: pytest.MonkeyPatch, last: dict[str, Any], **tag: Any) -> Update:
    """An update of rows of version 4 and 2 tokens, the last of which notes this and has these tags."""
    update = Update(monkeypatch, [4, 4, 4, 4], seen=0.0, eta=2)
    update.store["extra_fields"] = [{CHUNKS: [[(4, 2)]]}] * 3 + [last]
    update.batch.tags[3] |= tag
    return update


@pytest.mark.parametrize("noted", [{CHUNKS: [[(3, 1), (4, 1)]]}, {}])
def test_a_server_that_tells_the_version_before_its_own_stops_the_run(
    noted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last prompt was issued in step 5, under version 4. With chunks it is they that count: an attempt that was
    aborted before its first token may have met a server that had not loaded the weights yet.
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
