"""Whatever happens between trainer and loss to what the loss reads stops the run before the optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from tests.support import first_update as shared
from tests.support import training_worker as tw
from tests.support.fault_table import TABLE, find_missing_tests, render
from tests.support.input_faults import Fault, faults
from tests.support.paths import ROOT
from tests.support.specs import GSM, TIS_TOKEN

SPEC: dict[str, Any] = {"weight": TIS_TOKEN, "masks": {"gsm": GSM}, "denominator": "kept"}
LOSS: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.fixture(scope="module")
def sent(engine: Any) -> Any:
    """The batch as the trainer sends it; faults put other tensors into a copy."""
    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=shared.MISMATCH)
    rows.ref_log_probs = [old + 0.3 for old in rows.old_log_probs]
    rows.versions = [0, 0, 1, 1, 2, 0, 1, 2]
    return shared.planned(CorrectionSpec.from_mapping(SPEC), rows, step=3)


def update(engine: Any, data: Any, *, first: bool) -> None:
    loss = shared.adapter(SPEC, **LOSS)
    loss.prove = first
    tw.gradients(engine, loss, data, micro_batch_size=4)


@pytest.mark.parametrize("first", [True, False], ids=["first update", "later update"])
def test_untouched_it_trains(engine: Any, sent: Any, first: bool) -> None:
    update(engine, sent.clone(recurse=False), first=first)


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.what} {fault.how}")
def test_it_stops_in_the_worker(engine: Any, sent: Any, fault: Fault) -> None:
    from recipe.offpolicy.batch.seals import SealError

    for first in (True, False):
        data = sent.clone(recurse=False)
        fault.act(data)
        # A value that is not finite, a count of other mini-batches and a column that is not there are found in front.
        with pytest.raises((SealError, FloatingPointError, KeyError, ValueError)):
            update(engine, data, first=first)


def test_the_table_of_faults_is_that_of_the_tests() -> None:
    page = (ROOT / TABLE).read_text()
    assert find_missing_tests() == []
    assert render() in page, "run python -m tests.support.fault_table"
