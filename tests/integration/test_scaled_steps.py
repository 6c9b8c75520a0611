"""verl's FSDP engine with a learning rate that is multiplied by a factor: rates by hand, no trace after a step, and
resume.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.offpolicy.batch.plan import take_reports
from recipe.offpolicy.extensions.vcpo import FLAG, REPORT, find_wrong_rate, scale_steps
from tests.support import training_worker as tw
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.utils.losses import ppo_loss

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")

FACTORS = (0.5, 0.8, 0.4)
RATE = 1e-2


@pytest.fixture(scope="module")
def rows(dense_model: Path) -> tw.Rollout:
    return tw.add_log_probs(tw.start_worker(dense_model), tw.make_rollout(), mismatch=0.1)


def start(dense_model: Path, *, scaled: bool = True) -> Any:
    """A worker whose learning rate warms up over four updates: 0, 1/4, 1/2 and 3/4 of the full rate."""
    worker = tw.start_worker(dense_model)
    engine = worker.engine
    engine.lr_scheduler = get_constant_schedule_with_warmup(optimizer=engine.optimizer, num_warmup_steps=4)
    engine.checkpoint_manager.lr_scheduler = engine.lr_scheduler
    if scaled:
        scale_steps(SimpleNamespace(actor=worker))
    return worker


def update(worker: Any, rows: tw.Rollout, factor: float | None) -> list[Any]:
    data = rows.to_tensordict()
    if factor is not None:
        tu.assign_non_tensor(data, **{FLAG: factor})
    return take_reports(tw.update(worker, partial(ppo_loss, tw.actor_config()), data, mini_batches=2), REPORT)


def rates(worker: Any) -> tuple[float, float, float]:
    engine = worker.engine
    return engine.optimizer.param_groups[0]["lr"], engine.lr_scheduler.get_last_lr()[0], engine.lr_scheduler.base_lrs[0]


def test_the_factor_multiplies_each_step_and_never_the_next(dense_model: Path, rows: tw.Rollout) -> None:
    worker = start(dense_model)
    for number, factor in enumerate(FACTORS):
        planned = RATE * number / 4
        reports = update(worker, rows, factor)
        assert [(each.factor, *each.planned, *each.read) for each in reports] == [
            (factor, planned, planned * factor)
        ] * 2
        assert find_wrong_rate(reports, factor) is None
        assert rates(worker) == (RATE * (number + 1) / 4, RATE * (number + 1) / 4, RATE)
    missing = find_wrong_rate(update(worker, rows, None), 0.5)
    assert missing == "the worker received the factor None, but the trainer computed 0.5"


def test_a_factor_of_one_is_verls_own_to_the_bit_and_half_is_half_the_rate(dense_model: Path, rows: tw.Rollout) -> None:
    scaled, plain, slower = start(dense_model), start(dense_model, scaled=False), start(dense_model, scaled=False)
    half = start(dense_model)
    slower.engine.lr_scheduler.base_lrs = [RATE / 2]
    for _ in range(3):
        for worker, factor in ((scaled, 1.0), (plain, None), (half, 0.5), (slower, None)):
            update(worker, rows, factor)
    found = [tw.parameters(worker) for worker in (scaled, plain, half, slower)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(torch.equal(found[2][name], found[3][name]) for name in found[0])
    assert not all(torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(dense_model: Path, rows: tw.Rollout, tmp_path: Path) -> None:
    whole, first, second = start(dense_model), start(dense_model), start(dense_model)
    for factor in FACTORS:
        update(whole, rows, factor)
    for factor in FACTORS[:2]:
        update(first, rows, factor)
    first.engine.save_checkpoint(local_path=str(tmp_path), hdfs_path=None, global_step=2)
    second.engine.load_checkpoint(local_path=str(tmp_path), hdfs_path=None)
    assert rates(second) == rates(first) == (RATE / 2, RATE / 2, RATE)
    update(second, rows, FACTORS[2])
    one, other = tw.parameters(whole), tw.parameters(second)
    assert all(torch.equal(one[name], other[name]) for name in one)
