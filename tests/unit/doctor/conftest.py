"""Fixtures of all tests of the doctor."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.offpolicy.doctor.bash import programs
from tests.support.doctor_answer import Answer, Ask
from tests.support.paths import ROOT

LAUNCHES = ROOT / "tests" / "data" / "launch_kinds"


@pytest.fixture(autouse=True)
def programs_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs of a script finish on a busy machine, where they may take long."""
    monkeypatch.setattr(programs, "_SECONDS", 300)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Run the command in an empty folder, in which it must leave no files."""
    # Here and not above: test files of this folder that need no verl share this one.
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    from recipe.offpolicy.doctor.doctor_command import main

    monkeypatch.chdir(tmp_path)

    def asked(*arguments: str) -> Answer:
        status = main(arguments)
        return Answer(status, capsys.readouterr().out)

    yield asked
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    assert list(tmp_path.glob("outputs")) == [], "a look leaves nothing behind"


@pytest.fixture
def ask_launch(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask the doctor about a script of ``launch_kinds``, from a root like a checkout of verl with its own recipes."""
    verl = importlib.util.find_spec("verl")
    (tmp_path / "verl" / "trainer").mkdir(parents=True)
    (tmp_path / "verl" / "trainer" / "config").symlink_to(Path(verl.origin).parent / "trainer" / "config")
    (tmp_path / "own_recipe").symlink_to(LAUNCHES / "own_recipe")
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    monkeypatch.delenv("CHECKPOINTS", raising=False)

    def asked(name: str, *arguments: str) -> Answer:
        return ask("--script", str(LAUNCHES / f"{name}.sh"), *arguments)

    return asked
