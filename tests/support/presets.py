"""Every option of the Hydra group ``correction``, with a number for each value that the user must set."""

from __future__ import annotations

from typing import Any

import yaml

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.applications import CONFIGS, OPTIONS


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner) for key, inner in value.items()}
    return 0.05 if value == "???" else value


VALUES: dict[str, dict[str, Any]] = {
    option: _filled(yaml.safe_load((CONFIGS / "correction" / f"{option}.yaml").read_text()) or {}) for option in OPTIONS
}
"""Name of the option -> its plain values."""
PRESETS = {option: CorrectionSpec.from_mapping(values) for option, values in VALUES.items()}
"""Name of the option -> its correction."""
