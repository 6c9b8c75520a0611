"""A plugin: torch's sixty loggers pass their records to the root logger.

Otherwise pytest would attach its handlers to each of these loggers, six times per test.
"""

from __future__ import annotations

import logging

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True
