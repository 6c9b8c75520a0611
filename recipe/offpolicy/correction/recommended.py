"""Recommended settings for asynchronous and stale data and for mismatched engines, with the supporting measurement.

All code that recommends settings reads them from here: ``correction=auto``, the start-up checks, the attribution, the
report and ``run_async.sh``. The README and docs repeat these settings.
"""

from __future__ import annotations

from typing import Final

DELTA: Final = 0.1
"""Delta of all OPSM masks that we measured, in nats per token."""

OPTIONS: Final = ("opsm",)
VALUES: Final = {"correction.masks.opsm.delta": DELTA}
"""Overrides that the recommended options require."""

OVERRIDES: Final = ("correction=opsm", f"correction.masks.opsm.delta={DELTA}")
LINE: Final = " ".join(OVERRIDES)
"""The overrides in the form in which they are appended to a launch command."""

WEIGHTED_OPTIONS: Final = ("decoupled_ppo", "opsm")
WEIGHTED_LINE: Final = f"'correction=[decoupled_ppo,opsm]' correction.masks.opsm.delta={DELTA}"
"""Overrides for features that need a weight, such as an eta that follows the effective sample size. In our measurement,
these overrides performed worse than ``OVERRIDES``."""

WHY: Final = (
    "with rollout weights that are eight steps old, it ends at 0.602 exact matches, whereas uncorrected runs and "
    "decoupled_ppo end at 0.004, and [decoupled_ppo,opsm] ends at 0.355 (medians of eight runs, docs/collapse.md)"
)

BATCH_INVARIANT: Final = (
    "VLLM_BATCH_INVARIANT=1 in the launch's environment makes mu independent of the other requests in a batch; it "
    "works only on CUDA devices, slows generation, and leaves the trainer's kernels different"
)
"""A setting of vLLM that reduces the mismatch at equal weights instead of correcting for it; we have not tested it."""
