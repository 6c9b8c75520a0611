"""The method by which a trainer acts in verl's workers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl.workers.engine_workers")


def test_worker_groups_find_it_and_it_calls_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.worker.verl_workers import add_method, install_offpolicy
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
    from verl.workers.engine_workers import ActorRolloutRefWorker

    monkeypatch.setattr(ActorRolloutRefWorker, "install_offpolicy", None, raising=False)
    add_method(ActorRolloutRefWorker)

    class Own(ActorRolloutRefWorker):  # type: ignore[misc]
        """A fork's."""

    found: Any = Own.install_offpolicy
    assert getattr(found, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL
    called: list[Any] = []
    install_offpolicy("worker", [called.append, lambda worker: called.append(worker * 2)])
    assert called == ["worker", "workerworker"]
