"""The table of hooks in docs/architecture.md is that of the protocol and of who uses it."""

from __future__ import annotations

import importlib
import re

import pytest

from recipe.offpolicy.extensions.add_on import SHIPPED, AddOn
from tests.support.paths import ROOT

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

OWN = {
    "staleness limit": "staleness.staleness_limit:StalenessLimit",
    "snapshots": "staleness.weight_snapshots:WeightSnapshots",
    "routing replay": "replay.routing_replay:RoutingReplay",
    "Megatron's replay": "replay.megatron_engine:MegatronReplay",
    "support replay": "support.support_replay:SupportReplay",
    "score centering": "centering.score_centering:ScoreCentering",
    "delivery": "delivery.weight_delivery:WeightDelivery",
}


def load(target: str) -> type:
    module, _, name = target.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def test_it_has_every_hook_in_order_with_its_users() -> None:
    add_ons = {name: load(f"recipe.offpolicy.{target}") for name, target in OWN.items()}
    add_ons |= {name: load(target) for name, target in SHIPPED.items()}
    hooks = [name for name, value in vars(AddOn).items() if callable(value) or isinstance(value, property)]
    users = {
        hook: {name for name, kind in add_ons.items() if getattr(kind, hook) is not getattr(AddOn, hook)}
        for hook in hooks
    }
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    assert [hook for hook, _ in table] == hooks
    assert {hook: {name.strip() for name in names.split(",")} - {"-"} for hook, names in table} == users


def test_files_that_the_page_names_are_there() -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 15
    assert not [name for name in named if not ((ROOT / "recipe/offpolicy" / name).exists() or (ROOT / name).exists())]
