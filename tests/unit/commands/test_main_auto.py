"""``correction=auto`` and ``offpolicy.shadow`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import NEEDED
from tests.support.corrections import GSM, TIS, opsm, spec
from tests.support.launched import REFUSED, Launcher

pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")

AUTO = ("correction=auto", "setup.model=dense", "actor_rollout_ref.rollout.name=vllm", *NEEDED)


MASK = "{ratio: rollout, level: sequence, aggregate: geometric, lower: 0.99, upper: 1.01, when: any}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "option", "correction"),
    [
        # What the user says next to it wins.
        (
            ["correction.weight.upper=3.0", f"+correction.masks.gsm={MASK}"],
            "tis_token",
            spec(TIS | {"upper": 3.0}, gsm=GSM),
        ),
        (["trainer.v1.trainer_mode=colocate_async", "correction.masks.opsm.delta=0.3"], "opsm", spec(opsm=opsm(0.3))),
    ],
    ids=["with overrides", "async with a delta"],
)
def test_a_correction_is_chosen(
    arguments: list[str], option: str, correction: CorrectionSpec, launch: Launcher
) -> None:
    result = launch(*AUTO, *arguments)
    assert result.status == 0, result.status
    assert f"offpolicy: correction=auto selects correction=[{option}]" in result.printed
    for reason in ("setup.engine=different: ", "setup.minibatches=4: ", "setup.model=dense: "):
        assert f"offpolicy:   {reason}" in result.printed
    assert f"fingerprint {correction.fingerprint()}" in result.printed
    (config,) = result.trained
    assert Composed(config).spec == correction


@pytest.mark.slow
def test_shadows_are_options_by_name(launch: Launcher) -> None:
    result = launch("correction=tis_token", "offpolicy.shadow=[gsm,opsm]", "offpolicy.shadow_delta=0.2", *NEEDED)
    assert result.status == 0, result.status
    said = "offpolicy: shadow opsm: correction.masks.opsm.delta is not set; the report uses 0.2 nats per token"
    assert said in result.printed
    (config,) = result.trained
    shadows = Composed(config).shadows
    assert list(shadows) == ["gsm", "opsm"]
    assert dict(shadows["opsm"].masks)["opsm"].delta == 0.2
    assert dict(shadows["gsm"].masks)["gsm"].upper == 1.01
    # What is on stays as it was chosen.
    assert Composed(config).spec.weight is not None
    assert not Composed(config).spec.masks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shadow", "parts"),
    [
        ("[gsm,gsm]", ["offpolicy.shadow", "offpolicy.shadow=gsm: named twice"]),
        ("[bypass]", ["offpolicy.shadow=bypass", "changes pi_old"]),
    ],
)
def test_shadows_that_cannot_be_reported(shadow: str, parts: list[str], launch: Launcher, folder: Path) -> None:
    result = launch("correction=tis_token", f"offpolicy.shadow={shadow}", folder=folder)
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    for part in parts:
        assert part in result.status
    assert result.trained == []
