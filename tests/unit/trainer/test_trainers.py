"""Which correction a run's card names: the configured one, whatever is in force when the run is resumed."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec

CONFIGURED = {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}}
FALLBACK = CorrectionSpec()


class Supervised:
    """Stands in for Supervision: a checkpoint that is restored puts the fallback in force."""

    def __init__(self, spec: CorrectionSpec, config: Any, extensions: Any) -> None:
        self.spec = spec
        self.active_correction = SimpleNamespace(restore=self._restore)

    def _restore(self, state: Any) -> None:
        self.spec = FALLBACK


class Verls:
    def on_init_end(self) -> None: ...

    def init_workers(self) -> None: ...

    def _load_checkpoint(self) -> None: ...


@pytest.mark.parametrize("resumed", [None, {"alarms": {}}])
@pytest.mark.parametrize(("version", "begins"), [("v0", "init_workers"), ("v1", "on_init_end")])
def test_the_card_of_a_run_names_the_configured_correction(
    version: str, begins: str, resumed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version == "v1":
        pytest.importorskip("transfer_queue")
    module = import_module(f"recipe.offpolicy.trainer.trainer_{version}")
    named: list[CorrectionSpec] = []
    monkeypatch.setattr(module, "RunRecord", lambda config, spec, *described: named.append(spec))
    monkeypatch.setattr(module, "Supervision", Supervised)
    if version == "v0":
        monkeypatch.setattr(module, "around_advantage", lambda around: None)
        monkeypatch.setattr(module, "live_path", lambda config: SimpleNamespace(worker="engine"))
    made: Any = object.__new__(module.build_corrected(Verls))
    monkeypatch.setattr(type(made), "_hand_over_loss", lambda self: None)
    made.config = OmegaConf.create({"correction": CONFIGURED})
    made.actor_rollout_wg = SimpleNamespace(update_actor=None, compute_log_prob=None)
    made._resumed = resumed
    getattr(made, begins)()
    assert named == [CorrectionSpec.from_mapping(CONFIGURED)]
    assert made.correction == (FALLBACK if version == "v1" and resumed else named[0])
