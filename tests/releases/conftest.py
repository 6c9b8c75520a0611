"""Fixtures shared by the tests of the legacy actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import legacy_actor as la


@pytest.fixture(scope="module")
def legacy_patches() -> Iterator[None]:
    import verl.workers.actor.dp_actor  # noqa: F401
    import verl_patches

    assert verl_patches.install("legacy")["fsdp_actor"] == "in force"
    with la.process_group():
        yield


@pytest.fixture(scope="module")
def start() -> la.Parameters:
    return la.parameters(la.model())
