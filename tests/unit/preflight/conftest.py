"""Configurations that many tests of the start-up checks begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from tests.support.applications import NEEDED, application, without_verl


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of our primary configuration, composed without verl's."""
    return without_verl(tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    """verl's own defaults with ``correction=[tis_token,gsm]``: all checks pass."""
    with application("correction=[tis_token,gsm]", *NEEDED) as config:
        yield config
