"""The command, called in this process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from recipe.offpolicy import main_offpolicy
from recipe.offpolicy.doctor import launch as launch_module
from tests.support.applications import without_verl
from tests.support.launched import Launch, Launcher

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launcher:
    """Call ``main`` in this process, and note where training would have begun instead of training."""

    def run(*arguments: str, folder: Path | None = None) -> Launch:
        result = Launch()
        monkeypatch.setattr(main_offpolicy, "train", result.trained.append)
        # Hydra composes a configuration once more to read this from it.
        monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.RUN)
        if folder is not None:
            monkeypatch.setattr(main_offpolicy, "CONFIG_DIR", str(folder))
            program = replace(launch_module.OUR_PROGRAM, config_path=str(folder))
            monkeypatch.setattr(launch_module, "OUR_PROGRAM", program)
        # Among the overrides: Hydra takes flags in front of all of them or behind.
        first = next((place for place, each in enumerate(arguments) if each[0] != "-" and "=" in each), len(arguments))
        words = [*arguments[:first], *QUIET, *arguments[first:]]
        monkeypatch.setattr(sys, "argv", ["main_offpolicy", *words])
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
