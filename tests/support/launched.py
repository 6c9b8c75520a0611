"""Calls of the command in the process of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from omegaconf import DictConfig

REFUSED = "offpolicy: stopped before anything was started."


@dataclass
class Launch:
    """One call of ``main``: its exit status, what it printed, and the configurations that it trained."""

    status: object = 0
    printed: str = ""
    trained: list[DictConfig] = field(default_factory=list)


Launcher = Callable[..., Launch]
