"""Any change of the loss's inputs between trainer and loss stops the run before the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.batch.plan import PLAN, add_shares, check_shares
from recipe.offpolicy.batch.seals import LivenessError, SealError
from recipe.offpolicy.batch.weight_versions import CHUNKS, read_extra_fields
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.metrics import take_packets
from tests.support import first_update as shared
from tests.support import training_worker as tw
from tests.support.specs import GSM, TIS_TOKEN
from verl.utils import tensordict_utils as tu

Change = Callable[[torch.Tensor], torch.Tensor]
Turns = list[list[tuple[int, int]]]


def _at(place: int, change: Change) -> Change:
    """Change one token, or one row of a per-row column."""

    def changed(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[place] = change(values[place])
        return values

    return changed


OF_NUMBERS: dict[str, Change] = {
    "rounded to bfloat16": lambda values: values.bfloat16().to(values.dtype),
    "values of other rows": lambda values: values.flip(0),
    "one token changed by one ulp": _at(0, lambda value: torch.nextafter(value, torch.full_like(value, 9.0))),
    "one non-finite token": _at(0, lambda value: torch.full_like(value, torch.nan)),
}
OF_IDS: dict[str, Change] = {
    "ids of other rows": lambda values: values.flip(0),
    "one token changed": _at(0, lambda value: value + 1),
}
OF_THE_MASK: dict[str, Change] = {"one token missing": _at(0, torch.zeros_like), "all tokens valid": torch.ones_like}
OF_ROWS: dict[str, Change] = {
    "all ones": torch.ones_like,
    "one row changed": _at(0, lambda value: value + 1),
}
COLUMNS: dict[str, dict[str, Change]] = {
    "rollout_log_probs": OF_NUMBERS,
    "old_log_probs": OF_NUMBERS,
    "advantages": OF_NUMBERS,
    "ref_log_prob": OF_NUMBERS,
    "responses": OF_IDS,
    "response_mask": OF_THE_MASK,
    "input_ids": OF_IDS
    | {"one token changed": _at(-1, lambda value: value - 1), "a prompt token changed": _at(0, torch.zeros_like)},
    "position_ids": OF_IDS | {"shifted by one": lambda values: values + 1},
    "loss_mask": OF_THE_MASK | {"doubled": lambda values: 2 * values},
    "offpolicy_scale": OF_ROWS,
    "offpolicy_mini_batch_tokens": OF_ROWS,
}
LOST = ("rollout_log_probs", "old_log_probs", "advantages", "ref_log_prob", "offpolicy_scale", "extra_fields")
VERSIONS: dict[str, Callable[[list[int]], list[int]]] = {
    "newer by one": lambda versions: [version + 1 for version in versions],
    "all equal": lambda versions: [versions[0]] * len(versions),
    "versions of other rows": lambda versions: versions[1:] + versions[:1],
}
VERSIONS_OF_TOKENS = "versions per token"
OF_CHUNKS: dict[str, Callable[[list[Turns]], list[Turns]]] = {
    "a longer chunk": lambda rows: [[[(3, 2), (4, other - 1)]] for (((_, _), (_, other)),) in rows],
    "versions of other rows": lambda rows: rows[1:] + rows[:1],
    "swapped within a row": lambda rows: [[[(4, one), (3, other)]] for (((_, one), (_, other)),) in rows],
}
"""Changes of the chunks of rows whose first token was sampled by version 3 and the others by version 4."""
PLANS: dict[str, dict[str, Any]] = {
    "plan of another step": {"step": 9},
    "other bounds": {"bounds": {"masks.gsm": {"upper": 9.0}}},
    "fewer hashes": {"sealed": ("plan",)},
}


class Fault(NamedTuple):
    """A column or the plan, what happens to it, and the change of the batch on its way to the loss."""

    what: str
    how: str
    act: Callable[[TensorDict], None]


def _change(name: str, change: Change) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        column = data[name]
        if column.is_nested:
            values = change(column.values())
            data[name] = torch.nested.nested_tensor_from_jagged(values, column.offsets())
        else:
            data[name] = change(column)

    return act


def _lose(name: str) -> Callable[[TensorDict], None]:
    return lambda data: data.pop(name)


def _renumber(change: Callable[[list[int]], list[int]]) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        versions = change([row["min_global_steps"] for row in read_extra_fields(data)])
        data["extra_fields"] = NonTensorStack(*({"min_global_steps": v, "max_global_steps": v} for v in versions))

    return act


def _rechunk(change: Callable[[list[Turns]], list[Turns]]) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        fields = read_extra_fields(data)
        changed = change([row[CHUNKS] for row in fields])
        data["extra_fields"] = NonTensorStack(
            *({**row, CHUNKS: turns} for row, turns in zip(fields, changed, strict=True))
        )

    return act


def _replan(**changes: Any) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        tu.assign_non_tensor(data, **{PLAN: replace(tu.get_non_tensor_data(data, PLAN, None), **changes)})

    return act


def faults() -> Iterator[Fault]:
    """List all faults, column by column."""
    for name, changes in COLUMNS.items():
        for how, change in changes.items():
            yield Fault(name, how, _change(name, change))
    for how, renumber in VERSIONS.items():
        yield Fault("versions", how, _renumber(renumber))
    for how, rechunk in OF_CHUNKS.items():
        yield Fault(VERSIONS_OF_TOKENS, how, _rechunk(rechunk))
    for name in LOST:
        yield Fault(name, "missing", _lose(name))
    for name in ("old_log_probs", "advantages", "plan"):
        yield Fault(f"hash of {name}", "missing", _lose(f"offpolicy_seal_{name}"))
        yield Fault(
            f"hash of {name}", "hashes of other rows", _change(f"offpolicy_seal_{name}", lambda s: s.roll(1, 0) + 1)
        )
    for how, changes in PLANS.items():
        yield Fault("plan", how, _replan(**changes))


SPEC: dict[str, Any] = {"weight": TIS_TOKEN, "masks": {"gsm": GSM}, "denominator": "kept"}
BY_TOKEN: dict[str, dict[str, Any]] = {
    "level=version": {"weight": {**TIS_TOKEN, "level": "version"}},
    "bounds by age": {"weight": {**TIS_TOKEN, "by_staleness": [1.0, 1.5]}},
    "alpha=by_age": {"weight": TIS_TOKEN, "proximal": "loglinear", "alpha": "by_age"},
}
"""Corrections that read the version of each token."""
OF_TOKENS = [fault for fault in faults() if fault.what == VERSIONS_OF_TOKENS]
OF_INPUTS = [fault for fault in faults() if fault.what != VERSIONS_OF_TOKENS]
LOSS: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.fixture(scope="module")
def sent(engine: Any) -> Any:
    """The batch as the trainer sends it; faults replace tensors in a copy."""
    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=shared.MISMATCH)
    rows.ref_log_probs = [old + 0.3 for old in rows.old_log_probs]
    rows.versions = [0, 0, 1, 1, 2, 0, 1, 2]
    return shared.planned(CorrectionSpec.from_mapping(SPEC), rows, step=3)


@pytest.fixture(scope="module", params=BY_TOKEN)
def sent_by_token(engine: Any, request: Any) -> Any:
    """Rows whose first token was sampled by version 3 and the others by version 4, with a correction that reads
    versions.
    """
    mapping = BY_TOKEN[request.param]
    rows = tw.add_log_probs(engine, tw.make_rollout(tool_tokens=False), mismatch=shared.MISMATCH)
    rows.chunks = [[[(3, 1), (4, len(response) - 1)]] for response in rows.responses]
    return mapping, shared.planned(CorrectionSpec.from_mapping(mapping), rows, step=5)


def update(
    engine: Any,
    data: Any,
    *,
    first: bool,
    mapping: dict[str, Any] = SPEC,
    change: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run an update and return its metrics; ``change`` modifies what the engine sends with each micro-batch."""
    corrected = shared.adapter(mapping, **(LOSS if mapping is SPEC else {}))
    corrected.prove = first

    def loss(*, data: Any, **named: Any) -> Any:
        tu.assign_non_tensor(data, **{name: tu.get_non_tensor_data(data, name, 0) * by for name, by in change.items()})
        return corrected(data=data, **named)

    metrics, _ = tw.gradients(engine, loss, data, micro_batch_size=4)
    return metrics


@pytest.mark.parametrize("first", [True, False], ids=["first update", "later update"])
def test_untouched_it_trains(engine: Any, sent: Any, first: bool) -> None:
    update(engine, sent.clone(recurse=False), first=first)


@pytest.mark.parametrize("first", [True, False], ids=["first update", "later update"])
def test_untouched_versions_of_tokens_train(engine: Any, sent_by_token: Any, first: bool) -> None:
    mapping, data = sent_by_token
    update(engine, data.clone(recurse=False), first=first, mapping=mapping)


@pytest.mark.parametrize("fault", OF_TOKENS, ids=lambda fault: fault.how)
def test_other_versions_of_tokens_stop_in_the_worker(engine: Any, sent_by_token: Any, fault: Fault) -> None:
    mapping, sent = sent_by_token
    for first in (True, False):
        data = sent.clone(recurse=False)
        fault.act(data)
        with pytest.raises(SealError, match="token_versions changed before it reached the loss"):
            update(engine, data, first=first, mapping=mapping)


@pytest.mark.parametrize("fault", OF_INPUTS, ids=lambda fault: f"{fault.what} {fault.how}")
def test_it_stops_in_the_worker(engine: Any, sent: Any, fault: Fault) -> None:
    for first in (True, False):
        data = sent.clone(recurse=False)
        fault.act(data)
        # A value that is not finite, a count of other mini-batches and a column that is not there are found in front.
        with pytest.raises((SealError, FloatingPointError, KeyError, ValueError)):
            update(engine, data, first=first)


@pytest.mark.parametrize(
    ("name", "factor"), [("batch_num_tokens", 1), ("batch_num_tokens", 2), ("global_batch_size", 0.5)]
)
def test_other_denominators_stop_after_the_update(engine: Any, name: str, factor: float) -> None:
    weight = {"weight": TIS_TOKEN}
    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=shared.MISMATCH)
    data = shared.planned(CorrectionSpec.from_mapping(weight), rows, step=3)
    packets = take_packets(update(engine, data, first=False, mapping=weight, change={name: factor}))
    shares = add_shares(packet.shares for packet in packets)
    assert shares == pytest.approx({"batch_num_tokens": 1.0, "global_batch_size": 1.0} | {name: 1 / factor})
    if factor == 1:
        check_shares(shares, 1)
    else:
        with pytest.raises(LivenessError, match=f"^verl divides the loss by {name}, but"):
            check_shares(shares, 1)


def test_another_dp_size_stops_in_the_worker(engine: Any, sent: Any) -> None:
    with pytest.raises(SealError, match="verl multiplies the loss by dp_size, which is 2 in a micro-batch of 1"):
        update(engine, sent.clone(recurse=False), first=False, change={"dp_size": 2})
