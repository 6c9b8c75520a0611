"""The device work of the corrected loss, compared with verl's own: operations, waits and memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.batch.seals import INPUT, PLAN_HASH, build_seals, hash_model_input, key_of, seal_constant
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import take_packets
from scripts.benchmark.simulated_parts import CORRECTION, build_actor_config, build_micro_batch
from tests.support.growth import Work
from tests.support.legacy_rows import build_legacy_losses
from tests.support.padded_rows import pad_columns
from tests.unit.worker.test_host_transfers import WAITS

pytestmark = pytest.mark.verl(">=0.9")

SHORT = [8, 9, 10, 5] * 16
UNEVEN = [32768] + [256] * 128
READ = ("rollout_log_probs", "old_log_probs", "advantages", "response_mask")


def build(
    lengths: list[int], *, prove: bool = False, sealed: bool = True, padded: bool = False
) -> tuple[Callable[..., Any], ...]:
    """Build verl's loss and the corrected loss of a micro-batch, each as a function."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    output, data = build_micro_batch(sum(lengths), lengths)
    whole_input = hash_model_input(data)
    if padded:
        data = pad_columns(data)
    config = build_actor_config(len(data))
    corrected = OffPolicyLoss(CorrectionSpec.from_mapping(CORRECTION), config, prove=prove)
    plan = SharedPlan(1, sealed=(*READ, INPUT, PLAN_HASH) if sealed else ())
    tu.assign_non_tensor(data, **{PLAN: plan})
    columns = {name: data[name] for name in READ} | {INPUT: whole_input}
    seals = build_seals(data["responses"], data["response_mask"], columns) if sealed else {}
    for name, seal in (seals | {PLAN_HASH: seal_constant(plan.fingerprint(), len(data))}).items():
        data[key_of(name)] = seal
    return partial(ppo_loss, config), corrected, lambda loss: loss(model_output=output(), data=data)


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the number of operations in one call, and the number of these for which the host waits."""
    call()
    with Work() as work:
        call()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()
    assert recorded.profiler is not None
    return work.operations, sum(event.name() in WAITS for event in recorded.profiler.kineto_results.events())


def test_operations_and_waits_of_a_micro_batch() -> None:
    """The waits are for the numbers of verl's own metrics; ours are fetched once, see test_host_transfers."""
    verls, ours, call = build(SHORT, sealed=False)
    _, sealed, sealed_call = build(SHORT)
    operations, waits = zip(
        count(lambda: call(verls)), count(lambda: call(ours)), count(lambda: sealed_call(sealed)), strict=True
    )
    assert operations[1] <= 205
    assert operations[2] <= operations[1] + 165
    assert operations[0] > 3 * operations[1]  # verl cuts responses out row by row
    assert waits[0] > 64
    assert waits[1:] == (6, 7)  # one repeat_interleave, which does not wait because its output size is known


def update(loss: Any, call: Callable[[Any], Any]) -> None:
    value, metrics = call(loss)
    value.backward()
    take_packets(metrics)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("layout", "lengths", "prove"),
    product(["nested", "padded", "legacy"], [UNEVEN, [4096] * 128], [True, False]),
)
def test_memory_follows_tokens(layout: str, lengths: list[int], prove: bool) -> None:
    if layout == "legacy":
        _, verls, ours = build_legacy_losses(lengths, prove=prove)
        call: Callable[..., Any] = operator.call
    else:
        verls, ours, call = build(lengths, prove=prove, padded=layout == "padded")
    peaks = []
    for loss in (verls, ours):
        with Work() as work:
            update(loss, call)
        peaks.append(work.peak)
    if lengths is UNEVEN:  # verl pads each column of its 65 536 tokens to 4.2 million
        assert peaks[1] <= {"nested": 0.06, "padded": 0.25, "legacy": 0.35}[layout] * peaks[0]
    else:  # what measuring 2^18 tokens takes, however many there are
        assert peaks[1] - peaks[0] <= 60e6
