"""A plugin: a fixture for tests that examine many configurations of few actors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def each_actor_is_probed_once() -> Iterator[None]:
    """The probe of the base loss remembers its verdict by the actor's configuration."""
    from recipe.offpolicy.preflight import base_loss_probe

    verdicts: dict[tuple[str, bool], str | None] = {}
    probe = base_loss_probe.probe

    def remembered(actor: Any, *, split: bool = True) -> str | None:
        if (key := (repr(actor), split)) not in verdicts:
            verdicts[key] = probe(actor, split=split)
        return verdicts[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_loss_probe, "probe", remembered)
        yield
