"""Releases of verl that were tested, and the release that a version of it stands for. Needs no other package."""

from __future__ import annotations

TESTED = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")
_CALLED_OTHERWISE = {"0.8.0.dev": "0.8.0", "0.8.0.dev0": "0.8.0"}
"""What verl's tag v0.8.0 says of itself, in its version file and to pip."""


def release_of(version: str) -> str:
    """The release that a version stands for, without its local part: "0.8.0" for "0.8.0.dev" and "0.8.0+cpu"."""
    public = version.strip().partition("+")[0]
    return _CALLED_OTHERWISE.get(public, public)
