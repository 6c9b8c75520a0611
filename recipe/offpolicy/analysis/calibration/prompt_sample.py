"""Sample of a recording's prompts: a small recording stays in memory whole, a large one only with sampled prompts.

Rows of one prompt are dependent, so they are sampled together, which keeps the intervals of a calibration valid. A
prompt is drawn by a hash of its name, independent of the process and of the order of reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...recording import Recording, Rows
from ..attribution.scored_rows import BYTES_A_TOKEN
from .parts import BoundedPart

TOKENS: Final = 4_000_000
"""Number of tokens up to which a recording is kept whole, and of a larger one's sample, estimated from file sizes."""
ROWS: Final = 400_000
"""Number of rows in the sample of a larger recording, for parts that decide by row. With prompts of eight rows,
even if all eight are alike, a kept share of 0.98 then has a standard error of 0.0006."""


@dataclass(frozen=True)
class PromptSample:
    """Shares of the prompts whose units are kept; a smaller sample is part of a larger one.

    Attributes:
        tokens: share for parts that decide by token, turn or version.
        rows: share for parts that decide by row.
    """

    tokens: float = 1.0
    rows: float = 1.0

    @classmethod
    def of_recording(cls, recording: Recording) -> PromptSample:
        """Choose the shares that keep about ``TOKENS`` and ``ROWS``."""
        tokens = sum(path.stat().st_size for files in recording.files.values() for path in files) / BYTES_A_TOKEN
        if tokens <= TOKENS:
            return EVERY_PROMPT
        return cls(TOKENS / tokens, min(1.0, ROWS / recording.count_rows()))

    @property
    def sentence(self) -> str:
        """The sentence about the sample; empty if there is none."""
        if self == EVERY_PROMPT:
            return ""
        by_row = f"{self.rows:.2g}" if self.rows < 1 else "all"
        return (
            f"Bounds are based on a sample of the prompts, a share of {self.tokens:.2g} for parts that decide by token "
            f"and {by_row} for parts that decide by row; the total that a correction keeps is counted on every token."
        )

    def find_rows(self, prompt: NDArray[np.uint64], share: float | None = None) -> NDArray[np.bool_]:
        """Find the rows that belong to this share of the prompts (by default the largest share): (N,) bool.

        Args:
            prompt: (N,) of ``hash_prompts``.
        """
        share = max(self.tokens, self.rows) if share is None else share
        return (prompt / 2.0**64 < share) | (share >= 1)  # a hash near 2^64 is rounded to it

    def group_by_share(self, parts: Sequence[BoundedPart]) -> dict[float, list[BoundedPart]]:
        """Group parts by the share of the prompts that they use."""
        found: dict[float, list[BoundedPart]] = {}
        for part in parts:
            found.setdefault(self.rows if part.share_of == "rows" else self.tokens, []).append(part)
        return found


EVERY_PROMPT: Final = PromptSample()


def hash_prompts(rows: Rows) -> NDArray[np.uint64]:
    """Hash the name of each row's prompt, (N,); a row without one forms its own prompt."""
    hashes: dict[str, int] = {}
    found = np.empty(len(rows), dtype=np.uint64)
    places = zip(rows.step, rows.rank, rows.mini_batch, strict=True)
    for index, (place, uid) in enumerate(zip(places, rows.uid, strict=True)):
        # A uid cannot contain NUL, so a made-up name collides with no uid.
        name = str(uid) or "\0" + "/".join(map(str, (*place, index)))
        if name not in hashes:
            hashes[name] = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        found[index] = hashes[name]
    return found


def number_prompts(prompt: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number prompts in the order of their first occurrence, from 0: (N,)."""
    _, first, place = np.unique(prompt, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[place]
