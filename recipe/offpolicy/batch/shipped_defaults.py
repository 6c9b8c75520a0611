"""Defaults of ``offpolicy.*``, read from the YAML that ships them, their only source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_FILE = Path(__file__).resolve().parents[1] / "config" / "offpolicy_base.yaml"


def read_shipped_defaults(section: str) -> dict[str, Any]:
    """Read the shipped values of a section below ``offpolicy``, by key, in the order of the file."""
    return dict(_sections()[section])


@cache
def _sections() -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(_FILE).offpolicy)
    return dict(values)
