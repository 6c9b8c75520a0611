"""Converters from other frameworks' configuration keys to our plain values and, for three frameworks, back.

A missing key takes the default of the newest release that the converter names. ``SpecError``, which names the
framework's own key, is raised for options that the framework would silently ignore, for options without an equivalent
here, and for unknown keys that may concern a correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .correction_sections import AREAL, OPENRLHF, ROLL
from .flat_arguments import MILES, MS_SWIFT, OPEN_INSTRUCT, SLIME, TRL
from .loss_sections import NEMO_RL, PRIME_RL, SKYRL
from .peer import Peer
from .verl import VERL

PEERS: Final[Mapping[str, Peer]] = {
    "areal": AREAL,
    "miles": MILES,
    "ms_swift": MS_SWIFT,
    "nemo_rl": NEMO_RL,
    "open_instruct": OPEN_INSTRUCT,
    "openrlhf": OPENRLHF,
    "prime_rl": PRIME_RL,
    "roll": ROLL,
    "skyrl": SKYRL,
    "slime": SLIME,
    "trl": TRL,
    "verl": VERL,
}
"""Frameworks whose keys can be read, by their names on the command line."""

__all__ = ["PEERS"]
