"""verl's advantage estimators by what they read; one that is not listed may read anything."""

from __future__ import annotations

OUTCOME = (
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
)
"""Those that sum the rewards of a row before anything else."""
WITHOUT_PI_OLD = (*OUTCOME, "gae", "reinforce_plus_plus", "remax")
"""Those that read no log pi_old."""
