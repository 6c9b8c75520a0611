"""Malformed corrections, and the messages with which they are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from tests.support.corrections import GSM, TIS


def refused(mapping: Any, *parts: str) -> str:
    """Return the error message, which must contain each of the parts."""
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_mapping(mapping)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def weight(**changes: Any) -> dict[str, Any]:
    return {"weight": TIS | changes}


def mask(**changes: Any) -> dict[str, Any]:
    return {"masks": {"gsm": GSM | changes}}


def without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}
