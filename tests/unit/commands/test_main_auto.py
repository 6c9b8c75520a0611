"""``correction=auto`` on the command line: the choice, its reasons, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.auto_choice import check_requirements, read_setup, select
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import NEEDED, application
from tests.support.corrections import GSM, TIS, opsm, spec
from tests.support.launched import REFUSED, Launcher

pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")

AUTO = ("correction=auto", "setup.model=dense", "actor_rollout_ref.rollout.name=vllm", *NEEDED)
STALENESS = "trainer.v1.sampler.max_off_policy_threshold"


MASK = "{ratio: rollout, level: sequence, aggregate: geometric, lower: 0.99, upper: 1.01, when: any}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "option", "correction"),
    [
        ([], "tis_token", spec(TIS)),
        # What the user says next to it wins.
        (
            ["correction.weight.upper=3.0", f"+correction.masks.gsm={MASK}"],
            "tis_token",
            spec(TIS | {"upper": 3.0}, gsm=GSM),
        ),
        (["trainer.v1.trainer_mode=colocate_async"], "opsm", spec(opsm=opsm(0.1))),
        (
            ["trainer.v1.trainer_mode=colocate_async", "correction.masks.opsm.delta=0.3"],
            "opsm",
            spec(opsm=opsm(0.3)),
        ),
    ],
    ids=["plain", "with overrides", "async", "async with a delta"],
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
def test_auto_may_choose_nothing(launch: Launcher) -> None:
    own = ("correction=auto", "setup.model=dense", "setup.engine=same", "data.train_batch_size=256", *NEEDED)
    result = launch(*own)
    assert result.status == 0, result.status
    assert "correction=auto selects correction=[none]:" in result.printed
    (config,) = result.trained
    assert Composed(config).spec.is_none


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["setup.model=null"], ["setup.model=null: correction=auto needs this value", "Set setup.model=dense"]),
        pytest.param(
            ["setup.minibatches=2"],
            ["setup.minibatches=2: the configuration says 4: data.train_batch_size="],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["trainer.v1.trainer_mode=colocate_async", f"{STALENESS}=null"],
            [f"{STALENESS}=null: ", f"Set {STALENESS}=9"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["correction.weight=null"], ["correction=[tis_token]: overrides have removed all"], marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_auto_refuses(arguments: list[str], parts: list[str], launch: Launcher) -> None:
    result = launch(*AUTO, *arguments)
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    for part in parts:
        assert part in result.status
    assert result.trained == []


@pytest.mark.slow
def test_auto_on_a_mixture_of_experts(launch: Launcher) -> None:
    """On Megatron, with the keys that verl has for it."""
    replay, record = (
        "actor_rollout_ref.actor.megatron.router_replay.mode",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
    )
    arguments = [*AUTO[:1], "setup.model=moe", *AUTO[2:], "model_engine=megatron"]
    result = launch(*arguments)
    assert isinstance(result.status, str)
    assert f"{replay}=disabled: " in result.status
    assert f"{record}=false: " in result.status
    with application(*arguments, f"{replay}=R3", f"{record}=true") as config:
        setup = read_setup(Composed(config))
        assert (setup.model, setup.minibatches, setup.strategy) == ("moe", 4, "megatron")
        check_requirements(Composed(config), select(setup).requires)


def test_a_set_up_that_nothing_reads(launch: Launcher, folder: Path) -> None:
    status = launch("correction=gsm", "setup.model=moe", folder=folder).status
    assert isinstance(status, str)
    assert "setup.model=moe: only correction=auto reads it" in status
