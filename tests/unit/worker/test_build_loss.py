"""The loss that goes to the workers holds what the configuration and the trainer say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")

from recipe.offpolicy.worker.loss import build_loss
from tests.support.applications import NEEDED, application
from tests.support.corrections import GSM, TIS, spec

pytestmark = pytest.mark.verl(">=0.9")


def test_it_is_built_of_the_actors_configuration_and_the_recording(tmp_path: Path) -> None:
    recorded = f"offpolicy.record.dir={tmp_path / 'recording'}"
    with application("actor_rollout_ref.actor.clip_ratio=0.3", recorded, *NEEDED) as config:
        loss = build_loss(config, spec(TIS), {"gsm": spec(gsm=GSM)})
    assert (loss.spec, dict(loss.shadows), loss.prove) == (spec(TIS), {"gsm": spec(gsm=GSM)}, False)
    (actor_config,) = loss.verl_loss.args
    assert actor_config.clip_ratio == 0.3
    assert loss.record is not None
    assert Path(loss.record.dir) == tmp_path / "recording"
