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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a CUDA device where there is none."""
    if not any("gpu" in item.keywords for item in items):
        return
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
