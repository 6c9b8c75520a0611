"""What is said during a run is heard, also where verl sets up no logger."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from recipe.offpolicy.trainer import hooked

SAY = (
    "from recipe.offpolicy.trainer.hooked import logger, set_up_logger\n"
    "set_up_logger(); set_up_logger()\nlogger.info('it is live')\n"
)


def said(setup: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", setup + SAY], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_once_where_nobody_set_up_a_logger() -> None:
    assert said().count("it is live") == 1


def test_the_handler_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = logging.Logger("of the test")
    monkeypatch.setattr(hooked, "logger", fresh)
    monkeypatch.setattr(logging.getLogger("verl"), "handlers", [])
    hooked.set_up_logger()
    hooked.set_up_logger()
    assert len(fresh.handlers) == 1
