"""The start-up checks on verl's asynchronous programs, with the configuration that each release composes."""

from __future__ import annotations

from pathlib import Path

import pytest

import verl.experimental
from recipe.offpolicy.preflight.examination import examine
from tests.support.applications import NEEDED, application
from verl_patches.contract import demand_release
from verl_patches.hydra_sections import bring_sections
from verl_patches.releases import attributes_of

pytestmark = pytest.mark.verl(">=0.8")

PROGRAMS = {
    "fully_async_policy": "fully_async_ppo_trainer",
    "one_step_off_policy": "one_step_off_ppo_trainer",
}
LINES = {
    "weight by version": ("tis_token", "correction.weight.level=version"),
    "mask": ("gsm",),
    "loglinear by age": ("loglinear_by_age",),
    "auto": ("auto", "setup.engine=different", "setup.model=dense", "setup.trajectory=single"),
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_check_reads_them(program: str, line: str) -> None:
    option, *changes = LINES[line]
    own = [f"+correction@correction={option}", "hydra.searchpath=[pkg://verl.trainer.config]", *NEEDED, *changes]
    bring_sections()
    folder = Path(verl.experimental.__path__[0]) / program / "config"
    with application(*own, primary=PROGRAMS[program], folder=folder) as config:
        found = examine(config, own).problems
    assert not [problem for problem in found if problem.reason.startswith("The check")]
    assert not [problem for problem in found if "trainer.v1.trainer_mode" in problem.alongside]  # not of these programs
    refused = [
        problem for problem in found if "recording the version of each token has not been tested" in problem.reason
    ]
    by_token = line in ("weight by version", "loglinear by age") and program == "fully_async_policy"
    assert bool(refused) is (by_token and not attributes_of(demand_release()).token_versions)
