"""Shared by all tests: what runs where."""

from __future__ import annotations

import os

import pytest
import torch

pytest_plugins = ["release_marker"]

if not torch.cuda.is_available():
    # Before any test imports verl, which reads these once.
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_patches.cpu")


PROGRAMS = {"run_program", "alone"}
"""Fixtures of tests that run a program which takes all cores, one at a time."""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks tests that run such a program."""
    if PROGRAMS.intersection(getattr(item, "fixturenames", ())):
        item.add_marker("program")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a CUDA device where there is none."""
    if not any("gpu" in item.keywords for item in items):
        return
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
