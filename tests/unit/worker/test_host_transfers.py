"""What the worker's loss needs from the host: one number per micro-batch before the backward pass, and the rest in one
transfer.

On a machine without a device, a copy from the device cannot be observed. What can be observed is every operation that
must end before the host continues, and every call by which numbers of a tensor reach Python.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.profiler import ProfilerActivity, profile

from recipe.offpolicy.batch.plan import MINI_BATCH_TOKENS, PLAN, SCALE, SharedPlan, compute_constants
from recipe.offpolicy.batch.weight_versions import CHUNKS
from recipe.offpolicy.correction import CorrectionSpec, statistics
from recipe.offpolicy.correction.spec import WEIGHT, Side, read_bounds
from recipe.offpolicy.monitor.moving_bounds import UNITS
from recipe.offpolicy.worker import loss as worker_loss
from recipe.offpolicy.worker import metrics as packets
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY, Packet, take_packets
from tests.support.corrections import band, opsm, spec
from tests.support.examples import each_nth_by_default
from tests.support.presets import PRESETS
from verl_patches import worker_seams

WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::repeat_interleave",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::histc",
    "aten::equal",
    "aten::is_nonzero",
)
"""Operations whose result or size the host needs. Boolean indices appear as ``nonzero``."""
LEAVING = ("tolist", "numpy", "__array__", "cpu")
"""Methods of a tensor that return its numbers without an operation which a profiler sees on the CPU."""
SHADOWS = {"shadowed": spec(wide=band(0.9, 1.1), far=opsm(0.1))}
MOVING: dict[str, Side] = {"gsm": "both", WEIGHT: "upper"}
LENGTHS = ((3, 5, 2, 4), (6, 1, 4, 4), (2, 2, 7, 3))
"""Response tokens of each row of three micro-batches."""


@dataclass
class Seen:
    """What one call needed from the host: waits by operation, and readings fetched together, in order."""

    waits: list[str] = field(default_factory=list)
    fetches: list[int] = field(default_factory=list)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Count what happens inside; a fetch counts once, and nothing inside it counts."""
    seen, fetching = Seen(), []
    fetch = statistics.fetch

    def counted(readings: Any) -> Any:
        seen.fetches.append(len(readings))
        fetching.append(True)
        try:
            return fetch(readings)
        finally:
            fetching.pop()

    def leaving(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not fetching:
                seen.waits.append(name)
            return original(tensor, *args, **kwargs)

        return method

    with monkeypatch.context() as patched, profile(activities=[ProfilerActivity.CPU]) as recorded:
        for module in (worker_loss, packets):
            patched.setattr(module, "fetch", counted)
        for name in LEAVING:
            patched.setattr(torch.Tensor, name, leaving(name))
        yield seen
    # As the profiler took them down: the tree that ``events()`` makes of them takes ten times the loss itself.
    assert recorded.profiler is not None
    names = [event.name() for event in recorded.profiler.kineto_results.events()]
    seen.waits += [name for name in names if name in WAITS]


def plain_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """A loss that replaces verl's, which needs numbers on the host; it uses everything that a correction hands over."""
    mask, columns = data["response_mask"], ("old_log_probs", "advantages", "rollout_is_weights")
    weighed = sum((data[name] * mask).sum() for name in columns if name in data.keys() and not data[name].is_nested)
    return model_output["log_probs"].values().sum() * torch.as_tensor(weighed), {}


def micro_batch(correction: CorrectionSpec, lengths: tuple[int, ...], seed: int) -> tuple[dict[str, Any], TensorDict]:
    """Rows in the nested layout, with versions and the plan of a correction; each fourth response token is a tool's."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def noise(scale: float) -> list[torch.Tensor]:
        return [scale * torch.randn(length, generator=generator) for length in lengths]

    prompts = [torch.ones(2, dtype=torch.int64) for _ in lengths]
    responses = [torch.randint(3, 30, (length,), generator=generator) for length in lengths]
    mu = [-1.0 - row.abs() for row in noise(1.0)]
    old = [row + apart for row, apart in zip(mu, noise(0.1), strict=True)]
    columns: dict[str, Any] = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": nested([(torch.arange(length) % 4 != 3).long() for length in lengths]),
        "rollout_log_probs": nested(mu),
        "old_log_probs": nested(mu if correction.proximal != "recompute" else old),
        "advantages": nested([torch.full((length,), (-1.0) ** row) for row, length in enumerate(lengths)]),
    }
    span = {"min_global_steps": 0, "max_global_steps": 0}
    fields = [{**span, CHUNKS: [[(0, 3)]] * -(-length // 4)} for length in lengths]
    columns["extra_fields"] = NonTensorStack(*fields)
    data = TensorDict(columns, batch_size=len(lengths))
    tokens = sum(int(row.sum()) for row in data["response_mask"].unbind())
    constants = compute_constants(correction, data)
    shadows = {name: compute_constants(shadow, data) for name, shadow in SHADOWS.items()}
    moving = read_bounds(correction, MOVING)
    tu.assign_non_tensor(data, batch_num_tokens=tokens)
    tu.assign_non_tensor(data, **{PLAN: SharedPlan(1, constants, shadows, bounds=moving)})
    if correction.denominator == "kept":
        data[SCALE] = torch.ones(len(lengths), dtype=torch.float64)
        data[MINI_BATCH_TOKENS] = torch.full((len(lengths),), tokens)
    now = [
        torch.cat([row.new_zeros(1), row + apart, row.new_zeros(1)]) for row, apart in zip(old, noise(0.1), strict=True)
    ]
    return {"log_probs": nested(now).requires_grad_()}, data


def loss_of(correction: CorrectionSpec) -> OffPolicyLoss:
    moving = {name: MOVING[name] for name in read_bounds(correction, MOVING)}
    return OffPolicyLoss(correction, None, shadows=SHADOWS, moving=moving, base_loss=plain_loss)


# The clipped KL term is verl's own loss once more, with whatever that asks for; other terms ask for its config.
CASES = {
    name: each
    for name, each in PRESETS.items()
    if not (each.kl_clip or each.kl_weight or each.penalty or each.centering)
}
CASES |= {"moving": spec(gsm=band(0.9, 1.1), opsm=opsm(0.1))}


@pytest.mark.parametrize("name", each_nth_by_default(7, CASES))
def test_a_micro_batch_asks_once_and_an_update_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    correction = CASES[name]
    loss = loss_of(correction)
    rows = [micro_batch(correction, lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    reports: list[Packet] = []
    for model_output, data in rows:
        with watched(monkeypatch) as seen:
            value, metrics = loss(model_output, data)
        assert seen.waits == []
        assert len(seen.fetches) == (0 if correction.is_none else 1)
        value.backward()
        reports.append(metrics[METRIC_KEY])
    with watched(monkeypatch) as seen:
        worker_seams.complete({METRIC_KEY: reports})
    assert seen.waits == []
    assert len(seen.fetches) == 1
    with watched(monkeypatch) as seen:
        shipped = pickle.dumps({METRIC_KEY: reports})
    assert (seen.waits, seen.fetches) == ([], [])
    with watched(monkeypatch) as seen:
        arrived = take_packets(pickle.loads(shipped))
        assert take_packets({METRIC_KEY: reports}) == arrived
    assert (seen.waits, seen.fetches) == ([], [])
    assert len(arrived) == len(LENGTHS)
    tokens = sum(length - length // 4 for lengths in LENGTHS for length in lengths)
    assert arrived[0].statistics["keep/token_share"].parts[1] == tokens
    assert "attribution/kl_share/drift" in arrived[0].statistics
    assert "shadow/shadowed/keep_token_share" in arrived[0].statistics
    assert ("gsm/distance" in arrived[0].histograms) == ("gsm" in loss.moving)
    assert (UNITS in arrived[0].histograms) == (WEIGHT in loss.moving) == (correction.weight is not None)
    assert sum(len(packet.rows) for packet in arrived) == (0 if correction.is_none else 12)


@pytest.mark.parametrize(
    "ask", [lambda t: t.sum().item(), lambda t: t[t > 0], lambda t: t.unique(), lambda t: t.tolist(), lambda t: t.cpu()]
)
def test_the_count_sees_what_waits(ask: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4.0)
    with watched(monkeypatch) as seen:
        ask(values)
    assert seen.waits != []
