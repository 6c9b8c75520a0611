"""The command: what it refuses it refuses before Ray, with a status that scripts can see."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from recipe.offpolicy import main_offpolicy
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.main_offpolicy import prepare
from recipe.offpolicy.preflight.auto_choice import check_requirements, select
from recipe.offpolicy.preflight.auto_setup import read_setup
from recipe.offpolicy.preflight.checks import read_shadows, read_spec
from tests.support.applications import NEEDED, application, without_verl
from tests.support.corrections import GSM, TIS, spec
from tests.support.examples import few_when_quick
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")
REFUSED = "offpolicy: stopped before anything was started."


@dataclass
class Launch:
    """One call of ``main``: its exit status, what it printed, and the configurations that it trained."""

    status: object = 0
    printed: str = ""
    trained: list[DictConfig] = field(default_factory=list)


Launcher = Callable[..., Launch]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launcher:
    """``main`` in this process, with training replaced by a note that it would have begun."""

    def run(*arguments: str, folder: Path | None = None) -> Launch:
        result = Launch()
        monkeypatch.setattr(main_offpolicy, "train", result.trained.append)
        # Hydra composes a configuration once more to read this from it.
        monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.RUN)
        if folder is not None:
            monkeypatch.setattr(main_offpolicy, "CONFIG_DIR", str(folder))
        monkeypatch.setattr(sys, "argv", ["main_offpolicy", *arguments, *QUIET])
        monkeypatch.chdir(tmp_path)
        GlobalHydra.instance().clear()
        try:
            main_offpolicy.main()
        except SystemExit as stop:
            result.status = stop.code
        finally:
            GlobalHydra.instance().clear()
        printed = capsys.readouterr()
        result.printed = printed.out + printed.err
        return result

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_verl(tmp_path_factory.mktemp("configs"))


# What is said, key and value and fix, when the correction itself cannot be meant.
MALFORMED = {
    "null": (["correction=null"], ["correction=null", "Set correction=none"]),
    "deleted": (["~correction"], ["correction=null", "Set correction=none"]),
    "unknown key": (["+correction.x=1"], ["correction.x=1", "unknown key", "masks, proximal"]),
    "unknown key of a mask": (
        ["correction=gsm", "+correction.masks.gsm.uper=2"],
        ["correction.masks.gsm.uper=2", "unknown key", "aggregate, level, lower"],
    ),
    "bounds that cross": (
        ["correction=gsm", "correction.masks.gsm.lower=1.5"],
        ["correction.masks.gsm.lower=1.5", "correction.masks.gsm.upper=1.01", "Swap the bounds"],
    ),
    "a bound that is no number": (
        ["correction=tis_token", "correction.weight.upper=nan"],
        ["correction.weight.upper=nan", "expected a finite number"],
    ),
    "a bound in words": (
        ["correction=gsm", "correction.masks.gsm.upper='0.5_2.0'"],
        ["correction.masks.gsm.upper=0.5_2.0: expected a number", "lower=0.5", "upper=2.0"],
    ),
    "a bound left out": (
        ["correction=gsm", "~correction.masks.gsm.upper"],
        ["correction.masks.gsm.upper=???: not set", "Set correction.masks.gsm.upper=..."],
    ),
    "no delta": (
        ["correction=opsm"],
        ["correction.masks.opsm.delta=???: required", "Set correction.masks.opsm.delta="],
    ),
    "auto with others": (["correction=[auto,gsm]"], ["correction=[auto,gsm]: auto with others", "choose it alone"]),
    "two options, one key": (
        ["correction=[tis_token,gsm,tis_sequence]"],
        ["correction=[tis_token,gsm,tis_sequence]", "correction.weight.level", "Choose one"],
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_correction_is_refused(name: str, launch: Launcher, folder: Path) -> None:
    arguments, parts = MALFORMED[name]
    result = launch(*arguments, folder=folder)
    # sys.exit with a text prints it and gives the status 1.
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    for part in parts:
        assert part in result.status
    assert result.trained == []


def test_what_hydra_would_have_added_is_to_be_left_out(launch: Launcher) -> None:
    """Its last word is that of the launch: every key that verl does not have, and no advice to append one."""
    result = launch("correction=gsm", "trainer.total_epoch=1", "trainer.no_such=2", *NEEDED)
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    assert "trainer.total_epoch=1: verl " in result.status
    assert "has no such key. Leave it out, or set trainer.total_epochs; with a + nothing" in result.status
    assert "trainer.no_such=2: verl " in result.status
    assert result.trained == []


def test_a_configuration_without_our_sections_is_refused(launch: Launcher) -> None:
    result = launch("--config-path=config", "--config-name=ppo_megatron_trainer.yaml", *NEEDED)
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    assert "Give --config-name=offpolicy_megatron_trainer" in result.status


@pytest.mark.slow
def test_a_search_path_of_the_users_leaves_verls_configuration_in_reach(launch: Launcher, tmp_path: Path) -> None:
    result = launch(f"hydra.searchpath=[file://{tmp_path}]", "correction=gsm", *NEEDED)
    assert (result.status, len(result.trained)) == (0, 1)


def ours(result: Launch) -> list[str]:
    """The lines that are ours, of what was printed."""
    return [line.removeprefix("offpolicy: ") for line in result.printed.split("\n") if line.startswith("offpolicy: ")]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ([], "UNCORRECTED: correction=none, verl's own loss"),
        (
            ["algorithm.rollout_correction.rollout_is=token"],
            "UNCORRECTED: correction=none, verl's own algorithm.rollout_correction: rollout_is",
        ),
        (["correction=bypass"], "correction=bypass: proximal (pi_old: bypass)"),
        # Nothing of ours is in the loss, whatever is reported beside it.
        (["offpolicy.shadow=[gsm]"], "UNCORRECTED: correction=none, verl's own loss"),
    ],
)
def test_what_is_on_is_said_before_anything_else(arguments: list[str], first: str, launch: Launcher) -> None:
    for flags in (["--check"], []):
        result = launch(*flags, *arguments, *NEEDED)
        assert result.status == 0
        assert ours(result)[0] == first


# By what ends the launch: a value that verl cannot read, an interpolation, a value of our own.
NEVER_A_TRACEBACK = [
    ("data.train_batch_size=null", "data.train_batch_size=null: not a whole number of at least 1. Set "),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "ppo_mini_batch_size=0: not a whole number"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=abc", "ppo_mini_batch_size=abc: not a whole number"),
    ("actor_rollout_ref.actor.ppo_epochs=0", "ppo_epochs=0: not a whole number"),
    ("actor_rollout_ref.rollout.temperature=abc", "rollout.temperature=abc: not a number of at least 0"),
    ("algorithm.adv_estimator=null", "algorithm.adv_estimator=null: not a name"),
    ("trainer.project_name=${oc.env:NOBODY_SET_THIS}", "Export NOBODY_SET_THIS, or set trainer.project_name"),
    ("trainer.project_name=${no.such.key}", "Interpolation key 'no.such.key' not found"),
    ("trainer.project_name=${nobodys_resolver:1}", "Unsupported interpolation type nobodys_resolver"),
    ("offpolicy.record.dir=/proc/1/fdinfo", "offpolicy.record.dir=/proc/1/fdinfo: "),
    ("correction.masks.gsm.upper=1_01", "correction.masks.gsm.upper=101.0: Hydra reads 1_01 as this"),
    ("correction.masks.gsm.upper=1e12", "this bound can never act"),
]


@pytest.mark.parametrize(
    ("argument", "part"), few_when_quick(NEVER_A_TRACEBACK, lambda each: each[0].partition(".")[0])
)
def test_no_configuration_ends_in_a_traceback(
    argument: str, part: str, launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)  # which could register a resolver
    result = launch("correction=gsm", argument, *NEEDED)
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    assert part in result.status
    assert result.trained == []


def test_a_check_is_refused_like_a_launch(launch: Launcher, folder: Path) -> None:
    for order in (["--check", "+correction.x=1"], ["+correction.x=1", "--check"]):
        status = launch(*order, folder=folder).status
        assert isinstance(status, str)
        assert "correction.x=1" in status


def test_hydra_names_the_options_that_it_has(launch: Launcher, folder: Path) -> None:
    result = launch("correction=gmask", folder=folder)
    assert result.status == 1
    assert "gmask" in result.printed
    assert result.trained == []


def test_a_check_that_hydra_refuses_leaves_no_folder_behind(
    launch: Launcher, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert launch("--check", "correction=gmask", f"hydra.run.dir={tmp_path}/outputs", folder=folder).status == 1
    left = [path.name for path in tmp_path.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor")] == []  # torch's, where it is imported here


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["correction.x=1"], "correction.x=1: unknown key"),
        (["correction=gsm", "correction.masks.gsm.low=1"], "correction.masks.gsm.low=1: unknown key"),
        (["correction.masks.gsm.lower=1"], "no mask is chosen that correction.masks.gsm.lower could belong to"),
        (["correction=gsm", "correction=tis_token"], "correction is given 2 times"),
        (["correction=tis_token", "correction.weight=null"], "correction=[tis_token]: nothing is left"),
        (["correction=gsm", "~correction.masks.gsm"], "correction=[gsm]: nothing is left"),
    ],
)
def test_our_keys_are_answered_by_us(arguments: list[str], part: str, launch: Launcher) -> None:
    result = launch(*arguments, *NEEDED)
    assert isinstance(result.status, str)
    assert part in result.status
    assert result.trained == []


def test_check_alone_does_not_train(launch: Launcher) -> None:
    result = launch("--check", "correction=[tis_token,gsm]", *NEEDED)
    assert result.status == 0
    assert ours(result)[0] == (
        "correction=[tis_token,gsm]: weight (token, truncate [, 2] on pi_old / mu), "
        "masks.gsm (sequence, geometric [0.99, 1.01] on pi_old / mu)"
    )
    assert "all checks passed" in result.printed
    assert str(spec(TIS, gsm=GSM).fingerprint()) in result.printed
    assert result.trained == []


@pytest.mark.slow
def test_a_check_asks_verl_and_the_workers_environment(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launch would be stopped, before Ray."""
    monkeypatch.setenv("OFFPOLICY_X", "1")
    variable = "ray_kwargs.ray_init.runtime_env.env_vars.OFFPOLICY_X"
    for change, part in (
        ("actor_rollout_ref.actor.ppo_mini_batch_size=2048", "verl's own validation refuses it: train_batch_size"),
        (f"++{variable}=2", f"{variable}='2': workers need OFFPOLICY_X=1"),
        ("actor_rollout_ref.actor.policy_loss=null", "actor_rollout_ref.actor.policy_loss=null: this section"),
    ):
        for flags in (["--check"], []):
            result = launch(*flags, "correction=gsm", change, *NEEDED)
            assert isinstance(result.status, str)
            assert result.status.startswith(REFUSED)
            assert part in result.status
            assert result.trained == []
    assert launch("--check", "correction=gsm", f"++{variable}=1", *NEEDED).status == 0


def test_a_good_configuration_trains(launch: Launcher) -> None:
    """With verl's own helper, which by default runs at every step, turned off."""
    result = launch("correction=tis_token", "trainer.total_training_steps=3", *NEEDED)
    assert result.status == 0
    (config,) = result.trained
    assert config.trainer.total_training_steps == 3
    assert config.correction.weight.upper == 2.0
    assert config.algorithm.rollout_correction is None


def test_problems_around_the_correction_are_refused(launch: Launcher) -> None:
    rollout = "actor_rollout_ref.rollout"
    result = launch("correction=gsm", f"{rollout}.top_p=0.9", f"{rollout}.calculate_log_probs=false", *NEEDED)
    assert isinstance(result.status, str)
    assert result.status.startswith(REFUSED)
    assert f"{rollout}.top_p=0.9: " in result.status
    assert f"{rollout}.calculate_log_probs=false: " in result.status
    assert result.trained == []


def test_without_a_correction_verls_own_is_left_alone() -> None:
    changes = "algorithm.rollout_correction.rollout_is=token"
    with application("correction=none", changes, *NEEDED) as config:
        assert prepare(config)[0].is_none
        assert config.algorithm.rollout_correction.rollout_is == "token"


# correction=auto ------------------------------------------------------------------------------------------------

AUTO = ("correction=auto", "setup.model=dense", "actor_rollout_ref.rollout.name=vllm", *NEEDED)
STALENESS = "trainer.v1.sampler.max_off_policy_threshold"


MASK = "{ratio: rollout, level: sequence, aggregate: geometric, lower: 0.99, upper: 1.01, when: any}"


@pytest.mark.parametrize(
    ("arguments", "option", "correction"),
    [
        ([], "tis_token", spec(TIS)),
        # What the user says beside it wins.
        (
            ["correction.weight.upper=3.0", f"+correction.masks.gsm={MASK}"],
            "tis_token",
            spec(TIS | {"upper": 3.0}, gsm=GSM),
        ),
        (["trainer.v1.trainer_mode=colocate_async"], "decoupled_ppo", spec(TIS | {"upper": 5.0})),
    ],
    ids=["plain", "with overrides", "async"],
)
def test_a_correction_is_chosen(
    arguments: list[str], option: str, correction: CorrectionSpec, launch: Launcher
) -> None:
    result = launch(*AUTO, *arguments)
    assert result.status == 0, result.status
    assert f"offpolicy: correction=auto is correction=[{option}]:" in result.printed
    for reason in ("setup.engine=different: ", "setup.minibatches=4: ", "setup.model=dense: "):
        assert f"offpolicy:   {reason}" in result.printed
    assert f"fingerprint {correction.fingerprint()}" in result.printed
    (config,) = result.trained
    assert read_spec(config) == correction


def test_auto_may_choose_nothing(launch: Launcher) -> None:
    own = ("correction=auto", "setup.model=dense", "setup.engine=same", "data.train_batch_size=256", *NEEDED)
    result = launch(*own)
    assert result.status == 0, result.status
    assert "correction=auto is correction=[none]:" in result.printed
    (config,) = result.trained
    assert read_spec(config).is_none


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["setup.model=null"], ["setup.model=null: correction=auto needs it", "Set setup.model=dense"]),
        (
            ["setup.minibatches=2"],
            ["setup.minibatches=2: the configuration says 4: data.train_batch_size="],
        ),
        (
            ["trainer.v1.trainer_mode=colocate_async", f"{STALENESS}=null"],
            [f"{STALENESS}=null: ", f"Set {STALENESS}=9"],
        ),
        (["correction.weight=null"], ["correction=[tis_token]: nothing is left"]),
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
        setup = read_setup(config)
        assert (setup.model, setup.minibatches, setup.strategy) == ("moe", 4, "megatron")
        check_requirements(config, select(setup).requires)


@pytest.mark.parametrize("option", ["resampling", "verl_disabled"])
def test_other_names_of_none(option: str) -> None:
    with application(f"correction={option}", *NEEDED) as config:
        assert prepare(config)[0].is_none


def test_a_set_up_that_nothing_reads(launch: Launcher, folder: Path) -> None:
    status = launch("correction=gsm", "setup.model=moe", folder=folder).status
    assert isinstance(status, str)
    assert "setup.model=moe: only correction=auto reads it" in status


def test_the_quickstart_passes_its_own_checks() -> None:
    with application(primary="quickstart") as config:
        assert not prepare(config)[0].is_none


# The command itself, in a process of its own ----------------------------------------------------------------


def command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m recipe.offpolicy.main_offpolicy`` in another directory, where Ray would leave its traces."""
    return program(cwd, [sys.executable, "-m", "recipe.offpolicy.main_offpolicy", *arguments])


def program(cwd: Path, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(cwd), "PYTHONWARNINGS": "ignore", "PATH": path}
    return subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_composed_configuration_is_shown_anywhere(tmp_path: Path) -> None:
    done = command(tmp_path, "--cfg", "job", "correction=gsm")
    assert done.returncode == 0, done.stderr
    assert "lower: 0.99" in done.stdout
    assert "actor_rollout_ref:" in done.stdout


@pytest.mark.slow
def test_a_check_that_passes_leaves_no_folder_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = [sys.executable, "-B", "-m", "recipe.offpolicy.main_offpolicy", "--check", "correction=[tis_token,gsm]"]
    done = program(tmp_path, [*words, *NEEDED, f"hydra.run.dir={tmp_path}/outputs"], TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert "all checks passed" in done.stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


@pytest.mark.slow
def test_a_launch_that_is_refused_leaves_no_trace_of_ray(tmp_path: Path) -> None:
    done = command(
        tmp_path,
        "correction=[tis_token,opsm]",
        "correction.masks.opsm.delta=0.1",
        "distillation.enabled=true",
        "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        "algorithm.rollout_correction.rollout_is=token",
        *NEEDED,
    )
    assert done.returncode == 1
    for part in (
        REFUSED,
        "distillation.enabled=true: ",
        "loss_mode=geo_mean",
        "Set a loss_mode",
        "algorithm.rollout_correction.rollout_is=token: ",
    ):
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("**/session_*")), "Ray was started"


def test_shadows_are_options_by_name(launch: Launcher) -> None:
    result = launch("correction=tis_token", "offpolicy.shadow=[gsm,opsm]", "offpolicy.shadow_delta=0.2", *NEEDED)
    assert result.status == 0, result.status
    said = "offpolicy: shadow opsm: correction.masks.opsm.delta is not set; 0.2 nats a token is used to report"
    assert said in result.printed
    (config,) = result.trained
    shadows = read_shadows(config)
    assert list(shadows) == ["gsm", "opsm"]
    assert dict(shadows["opsm"].masks)["opsm"].delta == 0.2
    assert dict(shadows["gsm"].masks)["gsm"].upper == 1.01
    # What is on stays as it was chosen.
    assert read_spec(config).weight is not None
    assert not read_spec(config).masks


def test_shadows_have_to_fit_the_runs_pi_old(launch: Launcher) -> None:
    """Where pi_old is mu, what looks at their ratio would report that all is well."""
    for name, part in (("gsm", "masks.gsm.ratio=rollout"), ("tis_token", "correction.weight.ratio=rollout")):
        result = launch("correction=bypass", f"offpolicy.shadow=[{name}]", *NEEDED)
        assert isinstance(result.status, str)
        assert f"offpolicy.shadow={name}: " in result.status
        assert part in result.status
        assert result.trained == []


@pytest.mark.parametrize(
    ("shadow", "parts"),
    [
        ("[gsm,gsm]", ["offpolicy.shadow", "offpolicy.shadow=gsm: named twice"]),
        ("[nonsense]", ["nonsense"]),
        ("[none]", ["offpolicy.shadow=none", "no weight and no mask to report on"]),
        ("[bypass]", ["offpolicy.shadow=bypass", "changes pi_old"]),
        ("[1]", ["offpolicy.shadow", "offpolicy.shadow=1: no option", "Set offpolicy.shadow=[]"]),
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
