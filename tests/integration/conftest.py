"""Fixtures: real verl workers in this process, and the quickstart's data and model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for real verl TrainingWorkers in this process, with one rank on gloo."""
    from tests.support import training_worker as tw

    tw.join_process_group()
    return tw.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine_factory(dense_model: Path) -> Callable[[], Any]:
    """Create real verl TrainingWorkers with a tiny model."""
    from tests.support import training_worker as tw

    return lambda: tw.start_worker(dense_model)


@pytest.fixture(scope="session")
def engine(engine_factory: Callable[[], Any]) -> Any:
    """A TrainingWorker shared by tests in which the optimizer does not step."""
    return engine_factory()


@pytest.fixture(scope="session")
def made() -> dict[str, Path]:
    """The folders with the quickstart's data and model."""
    from scripts.quickstart.prepare import folder
    from scripts.quickstart.run import CACHE

    command = [sys.executable, "-m", "scripts.quickstart.prepare", "--cache", str(CACHE), "data", "model"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    return {part: folder(CACHE, part) for part in ("data", "model")}
