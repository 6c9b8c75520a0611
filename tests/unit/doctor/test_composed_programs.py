"""A program's configuration is composed as `python -m` composes it, and all unknown keys are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from recipe.offpolicy.doctor.diagnosis import diagnose
from recipe.offpolicy.doctor.launch import UnknownKeysError, compose
from recipe.offpolicy.doctor.program import Launch, LaunchError
from verl_patches.contract import installed_release

PROGRAM = '@hydra.main(config_path="config", config_name="run", version_base=None)\ndef main(config): ...\n'
CONFIGURATION = """
trainer: {total_epochs: 1, nnodes: '???'}
actor: {_target_: a.Actor, lr: 1.0, clip_ratio: 0.2, extra_kwargs: {a: 1}, policy_loss: {clip_cov_ratio: 0.1}}
free: {}
model_engine: dp
megatron: {override: {}}
nothing: null
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program with a folder of configurations next to it that is not a package."""
    folder = tmp_path / "a_recipe_of_mine"
    (folder / "config").mkdir(parents=True)
    (folder / "main.py").write_text(f"import hydra\n{PROGRAM}")
    (folder / "config" / "run.yaml").write_text(CONFIGURATION)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


def launch(*arguments: str) -> Launch:
    return Launch("a_recipe_of_mine.main", arguments)


def test_a_place_that_is_looked_for_from_here_is_named(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's recipes use such relative paths, because they are launched from the root of a checkout."""
    source = "hydra: {searchpath: ['file://some/config']}\ndefaults: [shared, _self_]\n"
    (program / "config" / "run.yaml").write_text(source)
    monkeypatch.chdir(program)
    with pytest.raises(LaunchError) as caught:
        compose(launch())
    fix = f"some/config does not exist in {program}. Fix: run the doctor from the launch directory."
    assert str(caught.value).endswith(fix)
    (program / "some" / "config").mkdir(parents=True)
    (program / "some" / "config" / "shared.yaml").write_text("x: 1\n")
    assert compose(launch()) == {"x": 1}


def test_a_verl_of_another_release_here_is_the_one_that_python_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    version = tmp_path / "verl" / "version" / "version"
    version.write_text("0.3.0.post1\n")
    assert diagnose(Launch("verl.trainer.main_ppo", ())).error.startswith(
        f"{tmp_path}/verl contains verl 0.3.0.post1, which"
    )
    version.write_text(f"{installed_release('verl')}\n")
    assert "is verl" not in diagnose(Launch("verl.trainer.main_ppo", ())).error


@pytest.mark.parametrize("written", ["", "_target_: verl.workers.config.FSDPActorConfig"])
def test_a_configuration_of_an_older_verl_is_told_as_such(written: str, program: Path) -> None:
    actor = f"{{strategy: fsdp, {written}}}"
    (program / "config" / "run.yaml").write_text(f"actor_rollout_ref: {{actor: {actor}, rollout: {{}}, model: {{}}}}\n")
    problems = diagnose(launch("+correction@correction=tis_token")).problems
    old = [problem.key for problem in problems if "_target_" in problem.reason]
    assert old == ([] if written else ["actor_rollout_ref.actor"])
    assert len(problems) == 1 or written


OVERRIDES = [
    "actor.clip_cov_ratio=0.2",
    *("trainer.total_epoch=3", "trainer.nnodes=2", "actor.grad_offload=True", "free.x=1", "trainer.no.such="),
    *(
        "actor.model_engine=x",
        "megatron.tp=2",
        "actor.megatron.tp=2",
        "+trainer.total_epochs=1",
        "actor.lr=2",
        "actor.extra_kwargs.b=2",
    ),
    "+trainer.mine=1",
]


def test_unknown_keys_are_told_at_once(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer also names a key that cannot be added because it exists and, for verl's own program, the effect of a
    plus.
    """
    with pytest.raises(UnknownKeysError) as caught:
        compose(launch(*OVERRIDES))
    has_none = "the configuration of a_recipe_of_mine.main has no such key."
    install = "therwise install the verl release that the program was written for."
    assert str(caught.value).split("\n") == [
        f"actor.clip_cov_ratio=0.2: {has_none} Set actor.policy_loss.clip_cov_ratio if that is what you mean. "
        f"O{install}",
        f"trainer.total_epoch=3: {has_none} Set trainer.total_epochs if that is what you mean. O{install}",
        f"actor.grad_offload=True: {has_none} O{install}",
        f"free.x=1: {has_none} Write +free.x: any key can be added there.",
        f"trainer.no.such=: {has_none} O{install}",
        f"actor.model_engine=x: {has_none} Set model_engine if that is what you mean. O{install}",
        f"megatron.tp=2: {has_none} Set model_engine=megatron, which adds the key.",
        f"actor.megatron.tp=2: {has_none} Set model_engine=megatron, which adds the key.",
        f"actor.extra_kwargs.b=2: {has_none} Write +actor.extra_kwargs.b: any key can be added there.",
    ]
    monkeypatch.setattr("recipe.offpolicy.doctor.launch.VERLS", ("a_recipe_of_mine.main",))
    with pytest.raises(UnknownKeysError) as caught:
        compose(launch(*OVERRIDES[1:4]))
    first, second = str(caught.value).split("\n")
    assert first.endswith(" Set trainer.total_epochs if that is what you mean.")
    assert second.endswith("and verl rejects it even with a +: it would have no effect.")
