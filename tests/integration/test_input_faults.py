"""Any change of the loss's inputs between trainer and loss stops the run before the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from recipe.offpolicy.batch.plan import add_shares, check_shares
from recipe.offpolicy.batch.seals import LivenessError, SealError
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.metrics import take_packets
from tests.support import first_update as shared
from tests.support import training_worker as tw
from tests.support.fault_table import PAGE, find_missing_tests, render
from tests.support.input_faults import VERSIONS_OF_TOKENS, Fault, faults
from tests.support.specs import GSM, TIS_TOKEN
from verl.utils import tensordict_utils as tu

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


def test_the_table_of_faults_is_that_of_the_tests() -> None:
    page = PAGE.read_text()
    assert find_missing_tests(page) == []
    assert render(page) == page, "run python -m tests.support.fault_table"
