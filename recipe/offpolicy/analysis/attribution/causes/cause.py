"""Verdict on one possible cause of a mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Verdict = Literal["present", "absent", "not testable"]

NAMES: Final = (
    "misalignment",
    "re-tokenisation",
    "stale weights",
    "temperature",
    "truncated sampling",
    "extra vocabulary",
    "numerics",
)
"""Every cause, in the order in which they are looked for."""


@dataclass(frozen=True)
class Cause:
    """One possible cause and the verdict on it.

    Attributes:
        name: one of ``NAMES``.
        verdict: "not testable" where the recording holds nothing to judge it by; ``sentence`` says what is lacking.
        evidence: what was measured, by name: effects, interval ends, counts.
        sentence: the finding, with its numbers.
        fix: a Hydra override or what else to do; empty unless present.
    """

    name: str
    verdict: Verdict
    evidence: Mapping[str, float]
    sentence: str
    fix: str = ""


def report_absent(name: str, sentence: str, **evidence: float) -> Cause:
    """Build the verdict "absent"."""
    return Cause(name, "absent", evidence, sentence)


def report_untestable(name: str, sentence: str, **evidence: float) -> Cause:
    """Build the verdict "not testable"; ``sentence`` says what is lacking."""
    return Cause(name, "not testable", evidence, sentence)
