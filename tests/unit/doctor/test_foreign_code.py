"""A script that is judged runs none of its code, neither from its folder nor from what it names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.applications import NEEDED
from tests.support.doctor_answer import Ask
from tests.support.paths import ROOT

MARK = "executed"
TRAP = f"""import pathlib
pathlib.Path({{folder!r}}, "{MARK}").write_text(__file__)
from recipe.offpolicy.extensions.add_on import Extension
class Tempo(Extension):
    pass
def compute_score(*args, **kwargs):
    return 1.0
"""
SHADOWING = ("logging", "rich", "hydra", "yaml", "torch", "numpy", "argparse", "json", "base64", "email")
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with modules that leave a mark when they are executed."""
    trap = TRAP.format(folder=str(tmp_path))
    (tmp_path / "evil.py").write_text(trap)
    for package in ("evilpkg", "hydra_plugins/evil", "model"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(trap)
    (tmp_path / "evilpkg" / "extra.yaml").write_text("x: 1\n")
    (tmp_path / "model" / "evil.py").write_text(trap)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoConfig": "evil.Tempo"}}')
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: evil.Tempo}\n")
    return tmp_path


def write(folder: Path, *overrides: str, before: str = "", module: str = "recipe.offpolicy.main_offpolicy") -> Path:
    script = folder / "run.sh"
    words = " ".join(f"'{each}'" for each in (*NEEDED, *overrides))
    script.write_text(f"{before}\npython3 -m {module} {words}\n")
    return script


NAMED = {
    "an extension": (["offpolicy.extensions={tempo: \"evil:Tempo\"}", "+tempo={a: 1}"], "offpolicy.extensions.tempo"),
    "a command": ([f"+{ACTOR}.x={{_target_: os.system, _args_: [\"touch {MARK}\"]}}"], "_target_=os.system"),
    "a loader": (
        [f"+{ACTOR}.x={{_target_: verl.utils.import_utils.load_extern_object, module_path: evil.py}}"],
        "load_extern_object",
    ),
    "a search path": (["hydra.searchpath=[pkg://evilpkg]", "+extra@x=extra"], "extra"),
    "a reward function": (["reward.custom_reward_function.path=evil.py"], ""),
    "an agent loop": (
        ["actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml", "correction=tis_token"],
        "",
    ),
    "a model with code": (["actor_rollout_ref.model.path=model", "actor_rollout_ref.model.trust_remote_code=true"], ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_what_a_script_names_is_not_executed(
    name: str, ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    overrides, said = NAMED[name]
    answer = ask(
        "--script", str(write(folder, *overrides, before="export PYTHONPATH=$PWD VERL_USE_EXTERNAL_MODULES=evil"))
    )
    assert not (folder / MARK).exists()
    assert said in answer.printed
    assert "Internal error in the doctor" not in answer.printed


@pytest.mark.slow
def test_the_users_own_extension_is_imported_where_the_launch_is_explicit(
    ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    ask(*NEEDED, 'offpolicy.extensions={tempo: "evil:Tempo"}', "+tempo={a: 1}")
    assert (folder / MARK).exists()
    sys.modules.pop("evil", None)


@pytest.mark.slow
def test_modules_of_the_folder_stand_in_for_no_others(folder: Path) -> None:
    """The command is called as a user types it, in the folder of the script, and reads a program of this folder."""
    pytest.importorskip("verl")
    for name in SHADOWING:
        (folder / f"{name}.py").write_text(TRAP.format(folder=str(folder)))
    lookup = "X=$(python3 -c \"import importlib.metadata; print(importlib.metadata.version('torch'))\")"
    script = write(folder, before=f"{lookup}\npython3 -c 'import evil' && echo there")
    done = subprocess.run(
        [sys.executable, "-m", "recipe.offpolicy.doctor", "--script", script.name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_MODULES": "evil"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (folder / MARK).exists(), (folder / MARK).read_text()
    assert "Not checked" in done.stdout, done.stdout + done.stderr
