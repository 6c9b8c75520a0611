"""On-policy distillation on verl 0.7.1's legacy FSDP actor, whose update is that of a loss written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from recipe.offpolicy.extensions.opd.signal import (
    CENTRE,
    FACTOR,
    ROW,
    SENT,
    TEACHER,
    OpdReport,
    OpdWorker,
    check_reports,
)
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.metrics import take_packets
from tests.support import legacy_actor as la
from tests.support import legacy_updates as lu

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches")]

COEF, BOUND = 0.5, 1.0


def shipped() -> dict[str, torch.Tensor]:
    """Every second row is eligible; the teacher is up to two nats apart."""
    batch = la.rollout()
    generator = torch.Generator().manual_seed(5)
    apart = 4 * torch.rand(batch["old_log_probs"].shape, generator=generator) - 2
    rows = torch.arange(len(apart)) % 2
    teacher = (batch["old_log_probs"] + apart).float()
    asked = rows[:, None].bool() & batch["response_mask"].bool()
    plain = {FACTOR: torch.ones(len(rows)), CENTRE: torch.zeros(len(rows))}
    return batch | plain | {TEACHER: teacher.masked_fill(~asked, torch.nan), ROW: rows.to(torch.int8)}


def taught_update(mapping: lu.Settings, *, mode: str = "loss", **config: Any) -> tuple[la.Parameters, list[OpdReport]]:
    settings = OpdSettings.from_mapping(
        "opd", {"mode": mode, "coef": COEF, "max_gap": BOUND, "teacher": {"url": "http://none:1"}}
    )
    found, metrics = lu.update(mapping, shipped(), sent={"extensions": {"opd": OpdWorker(settings)}}, **config)
    return found, [packet.reports["opd"] for packet in take_packets(metrics)]


def term(log_prob: torch.Tensor) -> torch.Tensor:
    """Half of the squared gap to the teacher, linear beyond the bound."""
    teacher = shipped()[TEACHER]
    gap = torch.where(torch.isnan(teacher), 0.0, log_prob - teacher)
    huber = torch.nn.functional.huber_loss(gap, torch.zeros_like(gap), reduction="none", delta=BOUND)
    return COEF * huber


@pytest.mark.parametrize("mode", ["loss", "advantage"])
def test_the_actors_own_list_of_columns_stops_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the patch that lets ours through: the first update that has eligible rows."""
    from verl import DataProto
    from verl_patches.legacy.algorithms import Carried

    genuine = Carried.select

    def forgetful(self: Any, batch_keys: Any = None, *arguments: Any, **named: Any) -> Any:
        found = genuine(self, batch_keys, *arguments, **named)
        return DataProto.select(found, [name for name in found.batch.keys() if name not in SENT])

    monkeypatch.setattr(Carried, "select", forgetful)

    def first_update() -> None:
        _, reports = taught_update(lu.MAPPINGS["tis"], mode=mode)
        check_reports(reports, mode)
        sent: Any = SimpleNamespace(section="opd", sent={"a": 1})
        AddOns()._compare_rows(sent, reports, epochs=1)

    with pytest.raises(LivenessError, match=r"offpolicy_opd_teacher.* did not reach the loss"):
        first_update()


@pytest.mark.parametrize("name", lu.MAPPINGS)
@pytest.mark.parametrize("size", [2, 8])
def test_the_term_is_trained_with_the_denominators_of_the_mini_batch(
    name: str, size: int, start: la.Parameters
) -> None:
    found, reports = taught_update(lu.MAPPINGS[name], ppo_micro_batch_size_per_gpu=size)
    # The teacher's log-probs are float32, and so is the gap.
    assert la.distance(found, lu.plain_with_term(lu.MAPPINGS[name], shipped(), term), start) < 1e-5
    assert len(reports) == len(la.LENGTHS) // size
    check_reports(reports, "loss")
    assert sum(len(report.hashes or ()) for report in reports) == len(la.LENGTHS) // 2
