"""On-policy distillation on verl 0.7.1's legacy FSDP actor stops if the teacher's columns do not reach the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from recipe.offpolicy.extensions.opd.signal import CENTRE, FACTOR, ROW, SENT, TEACHER, OpdWorker, check_reports
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.metrics import take_packets
from tests.support import legacy_actor as la
from tests.support.legacy_actor import update
from tests.support.specs import TIS_TOKEN

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches")]


@pytest.mark.parametrize("mode", ["loss", "advantage"])
def test_the_actors_own_list_of_columns_stops_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the patch that lets our columns through, the first update with eligible rows stops."""
    from verl import DataProto
    from verl_patches.legacy.algorithms import Carried

    genuine = Carried.select

    def forgetful(self: Any, batch_keys: Any = None, *arguments: Any, **named: Any) -> Any:
        found = genuine(self, batch_keys, *arguments, **named)
        return DataProto.select(found, [name for name in found.batch.keys() if name not in SENT])

    monkeypatch.setattr(Carried, "select", forgetful)
    batch, rows = la.rollout(), torch.arange(len(la.LENGTHS)) % 2  # every second row is eligible
    asked = rows[:, None].bool() & batch["response_mask"].bool()
    batch |= {
        FACTOR: torch.ones(len(rows)),
        CENTRE: torch.zeros(len(rows)),
        ROW: rows.to(torch.int8),
        TEACHER: (batch["old_log_probs"] - 0.5).float().masked_fill(~asked, torch.nan),
    }
    settings = OpdSettings.from_mapping("opd", {"mode": mode, "teacher": {"url": "http://none:1"}})
    sent: Any = SimpleNamespace(section="opd", sent={"a": 1})

    def first_update() -> None:
        _, metrics = update({"weight": TIS_TOKEN}, batch, sent={"extensions": {"opd": OpdWorker(settings)}})
        reports = [packet.reports["opd"] for packet in take_packets(metrics)]
        check_reports(reports, mode)
        AddOns()._compare_rows(sent, reports, epochs=1)

    with pytest.raises(LivenessError, match=r"offpolicy_opd_teacher.* did not reach the loss"):
        first_update()
