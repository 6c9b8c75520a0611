"""``offpolicy.shadow`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import NEEDED
from tests.support.launched import REFUSED, Launcher

pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")


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
def test_shadows_have_to_fit_the_runs_pi_old(launch: Launcher) -> None:
    """Where pi_old is mu, what looks at their ratio would report that all is well."""
    for name, part in (("gsm", "masks.gsm.ratio=rollout"), ("tis_token", "correction.weight.ratio=rollout")):
        result = launch("correction=bypass", f"offpolicy.shadow=[{name}]", *NEEDED)
        assert isinstance(result.status, str)
        assert f"offpolicy.shadow={name}: " in result.status
        assert part in result.status
        assert result.trained == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shadow", "parts"),
    [
        ("[gsm,gsm]", ["offpolicy.shadow", "offpolicy.shadow=gsm: named twice"]),
        ("[nonsense]", ["nonsense"]),
        ("[none]", ["offpolicy.shadow=none", "no weight and no mask to report on"]),
        ("[bypass]", ["offpolicy.shadow=bypass", "changes pi_old"]),
        ("[1]", ["offpolicy.shadow", "offpolicy.shadow=1: not an option", "Set offpolicy.shadow=[]"]),
        ("3", ["offpolicy.shadow=3", "Set offpolicy.shadow=[gsm]"]),
    ],
)
def test_shadows_that_cannot_be_reported(shadow: str, parts: list[str], launch: Launcher, folder: Path) -> None:
    result = launch("correction=tis_token", f"offpolicy.shadow={shadow}", folder=folder)
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    for part in parts:
        assert part in result.status
    assert result.trained == []
