"""A plugin: torch's sixty loggers hand what they say to the root logger.

pytest puts its handlers on each logger that does not, six times a test, to hear the same.
"""

from __future__ import annotations

import logging

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True
