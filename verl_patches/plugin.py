"""Entry point of the group `verl.plugins`, which verl imports in every process from 0.9 on.

Inert unless OFFPOLICY_PATCHES names groups, as in `OFFPOLICY_PATCHES=cpu,legacy`, or says `auto`. verl logs a plugin
that fails at DEBUG and carries on; the failure is kept, and `verl_patches.status()` raises it.
"""

from __future__ import annotations

import os

from . import install
from .failures import record
from .groups import ASKED_BY_NAME, AUTO, named


def load() -> None:
    """Install what the environment asks for by name.

    Raises:
        PatchError: unknown group, or a target is not what its patch was written for.
    """
    for name in named(os.environ):
        try:
            install(None if name == AUTO else name)
        except Exception as error:
            record(f"{ASKED_BY_NAME}={os.environ[ASKED_BY_NAME]}", error)
            raise


load()
