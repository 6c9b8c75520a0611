"""Moving bounds and fallbacks reach verl 0.7.1's legacy FSDP actor with each batch, and are proved live there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support import legacy_actor as la
from tests.support.specs import GSM, OPSM, STACK

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches")]

EXACT = 1e-10
MOVED: dict[str, dict[str, float | None]] = {"gsm": {"lower": 0.95, "upper": 1.2}, "opsm": {"delta": 0.01}}
MOVED_STACK = STACK | {"masks": {"gsm": GSM | MOVED["gsm"], "opsm": OPSM | MOVED["opsm"]}}
MOVING: Any = {"gsm": "both", "opsm": "both"}


def handed(mapping: dict[str, Any], bounds: Any, **handover: Any) -> Any:
    """The batch as the trainer sends it, with these bounds in its plan."""
    from verl_patches.legacy.handover import HANDOVER

    data = la.handed(la.rollout(), mapping)
    sent = data.meta_info[HANDOVER]
    data.meta_info[HANDOVER] = replace(sent, plan=replace(sent.plan, bounds=bounds), moving=MOVING, **handover)
    return data


def judged(metrics: dict[str, Any], mapping: dict[str, Any]) -> dict[str, float]:
    from tensordict import TensorDict

    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.proof.verify import verify
    from recipe.offpolicy.worker.metrics import take_packets
    from tests.support.sampled_rows import compute_sampled_checksums

    batch = la.rollout()
    sampled = compute_sampled_checksums(TensorDict(batch, batch_size=len(batch["responses"])))
    spec = CorrectionSpec.from_mapping(mapping)
    return verify(take_packets(dict(metrics)), spec, sampled_rows=sampled, moving=MOVING)


def test_the_bounds_of_the_plan_make_the_update_and_are_proved() -> None:
    from recipe.offpolicy.correction.statistics import merge_all
    from recipe.offpolicy.worker.metrics import take_packets

    start = la.parameters(la.model())
    got, metrics = la.moved(la.actor(), handed(STACK, MOVED))
    assert la.distance(la.plain_update(la.rollout(), la.Plain(MOVED_STACK)), got, start) < EXACT
    assert la.distance(la.plain_update(la.rollout(), la.Plain(STACK)), got, start) > 1e-2
    live = judged(metrics, MOVED_STACK)
    assert (live["proved"], live["parts"]) == (1.0, 3.0)
    packets = take_packets(metrics)
    assert [packet.bounds for packet in packets] == [MOVED] * 2
    # Eight rows, of which four have a negative advantage.
    counted = {name: sum(one.parts) for name, one in merge_all(packet.histograms for packet in packets).items()}
    assert counted["gsm/distance"] == 8.0
    assert counted["opsm/distance"] == 4.0
