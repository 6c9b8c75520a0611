"""Entry point in the group `verl.plugins`, which verl 0.9 and later load in every process.

The plugin does nothing unless OFFPOLICY_PATCHES names groups, as in `OFFPOLICY_PATCHES=cpu,legacy`, or is `auto`. If a
plugin fails, verl logs the failure at DEBUG and continues; this package records it, and `verl_patches.status()` raises
it.
"""

from __future__ import annotations

import os

from . import ASKED_BY_NAME, AUTO, install, named, record_failure


def load() -> None:
    """Install the groups that the environment names.

    Raises:
        PatchError: a group is unknown, or a target differs from the one for which its patch was written.
    """
    for name in named(os.environ):
        try:
            install(None if name == AUTO else name)
        except Exception as error:
            record_failure(f"{ASKED_BY_NAME}={os.environ[ASKED_BY_NAME]}", error)
            raise


load()
