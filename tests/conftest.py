"""Fixtures and hooks shared by all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.examples import FEW, choose_few

# How long an example takes says how busy the machine is.
DRAWN = min(100, int(os.environ.get(FEW, 100)))  # where a test asks for no number of its own
settings.register_profile(
    "any machine", max_examples=DRAWN, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

pytest_plugins = [
    "tests.support.garbage",  # first: before anything large is imported
    "tests.support.captured_loggers",
    "tests.support.parsed_once",
    "tests.support.probed_once",
    "tests.support.programs",
    "tests.support.recorder_clock",
    "tests.support.release_marker",
]

if not torch.cuda.is_available():
    # Before any test imports verl, which reads these once.
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_patches.cpu")


PROGRAM = "run_program"  # scripts/test.sh finds test files by this name
"""Fixture of tests that run a program which uses all cores; these tests run one at a time."""
HANGS = 3600
"""Time limit in seconds for such a test; the programs that it starts have shorter limits."""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that start such a program."""
    if PROGRAM in getattr(item, "fixturenames", ()):
        item.add_marker("program")
        # Without the fixtures: the wait for the programs of other checkouts is none of the test's.
        item.add_marker(pytest.mark.timeout(HANGS, func_only=True))


@pytest.hookimpl(trylast=True)  # after what -m leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select few tests for ``--quick``, and skip tests that need a CUDA device if there is none."""
    if os.environ.get(FEW):
        chosen = set(choose_few(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _loggers_of_verl() -> Iterator[None]:
    """Let each test capture log records of every level, and restore verl's loggers, whose levels some
    programs change.
    """
    speakers = [logging.getLogger("verl"), logging.getLogger("verl.offpolicy")]
    found = [(speaker.propagate, list(speaker.handlers)) for speaker in speakers]
    for speaker in speakers:
        if speaker.level != logging.NOTSET:  # to set a level empties the caches of all loggers
            speaker.setLevel(logging.NOTSET)
        speaker.propagate = True
    # A package that a program needs may have raised them, pytest's own handlers included, when it was imported.
    root = logging.getLogger()
    for raised in (root, *root.handlers):
        if raised.level > logging.WARNING:
            raised.setLevel(logging.WARNING)
    yield
    for speaker, (propagate, handlers) in zip(speakers, found, strict=True):
        speaker.propagate = propagate
        speaker.handlers[:] = handlers


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not draw panels, which takes most of the time of writing a page, in tests that read only the text."""
    from recipe.offpolicy.analysis import page

    monkeypatch.setattr(page, "serialize", lambda panel: "{}")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Log messages of level WARNING or above."""
    with caplog.at_level(logging.WARNING):
        yield caplog
