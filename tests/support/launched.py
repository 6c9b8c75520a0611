"""Calls of the command within the test's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from omegaconf import DictConfig

REFUSED = "offpolicy: stopped before anything was started."


@dataclass
class Launch:
    """One call of ``main``: its exit status, its output, and the configurations that it trained."""

    status: object = 0
    printed: str = ""
    trained: list[DictConfig] = field(default_factory=list)


Launcher = Callable[..., Launch]
