"""Runs the experiments with SmolLM2-135M-Instruct, one after another, and skips those that have finished.

    python scripts/evidence/real_model/run.py --list                 # every run, whether it has finished, and its time
    python scripts/evidence/real_model/run.py [NAME ...] [--hours H] # NAME: an arm, or a run such as late_opsm-3

VENV=path names an environment with verl 0.9.1, by default the environment that runs this script. Each run is a run of
scripts/quickstart.sh; its steps are added to results.parquet next to this file when it has ended. PLAN.md describes
what is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results
from collapse.arms import Arm, Run, list_runs
from collapse.run import add_lag, make_quickstart, unwind_when_terminated
from seeds import build_parser, make_runs

from scripts.quickstart.options import MODEL_PATH, quote
from verl_patches.releases import TESTED

DATA = Path(__file__).resolve().with_name("results.parquet")
LOGS = ROOT / "outputs" / "evidence" / "real_model"
LAG = 4
SECONDS = 660
COLUMNS = {
    "right": "val-core/reasoning_gym/chain_sum/acc/mean@4",
    "reward": "critic/rewards/mean",
    "k3": "offpolicy/kl/k3",
    "ratio_ess": "offpolicy/rollout_ratio/ess",
    "kept": "offpolicy/keep/token_share",
    "update_seen": "offpolicy/delivery/update_seen",
    "weight_max": "offpolicy/weight/max",
    "length": "response_length/mean",
    "clipped": "response_length/clip_ratio",
    "anchor": "length/anchor/mean",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "proved": "offpolicy/live/proved",
    "seconds": "timing_s/step",
}
"""Column -> verl's metric; NaN in steps that did not log the metric."""

_QUIET = "offpolicy.alarms.mismatch_growth.action=off"
_UNSCORED = "trainer.val_before_train=false"
_STEPS = ("trainer.total_training_steps=10", _QUIET)
_OPSM = "correction.masks.opsm.delta=0.1"
_CORRECTIONS = {
    "none": ("correction=none",),
    "tis": ("correction=tis_token",),
    "opsm": ("correction=opsm", _OPSM),
    "gsm": ("correction=gsm",),
    "gsm_wide": ("correction=gsm", "correction.masks.gsm.lower=0.9", "correction.masks.gsm.upper=1.1"),
}
_FLOAT32 = "actor_rollout_ref.rollout.dtype=float32"
_BFLOAT16 = "actor_rollout_ref.rollout.dtype=bfloat16"
_SHORT = ("trainer.total_training_steps=4", _UNSCORED, _QUIET)
UNROUNDED = ("unrounded", "float32_unrounded")
"""Arms that start from the dequantised weights without rounding."""


_LENGTHS = {
    "none": (),
    "uniform": ("length_penalty.coefficient=0.01",),
    "group": ("length_penalty.coefficient=0.5",),
    "anchor": (
        "length_penalty.coefficient=0.5",
        "length_penalty.anchor.per=source",
        "length_penalty.anchor.pass_rate=0.2",
        "length_penalty.anchor.min_samples=64",
    ),
}
"""Maps each kind of length penalty to its settings.

The anchor is frozen at the first batch in which more than 20 % of the answers are correct.
"""


def _build_length_arm(kind: str, *chosen: str) -> Arm:
    """Build an arm of the comparison of length penalties; the score before training is already known from `none`."""
    place = () if kind == "none" else ("length_penalty.place=before",)
    steps = ("data.max_response_length=48", "trainer.total_training_steps=14", _QUIET)
    scored = () if kind == "none" else (_UNSCORED,)
    overrides = (*_CORRECTIONS["tis"], _FLOAT32, f"length_penalty={kind}", *place, *chosen, *steps, *scored)
    return Arm(f"length_{kind}", overrides, seeds=2, seconds=900)


def _build_arm(name: str, *chosen: str, lag: int = 0) -> Arm:
    """Build an arm; the share of correct answers before training is already known from `none`."""
    return Arm(name, (*chosen, *_STEPS, _UNSCORED), lag, seeds=3, seconds=SECONDS)


ARMS = (
    Arm("none", (*_CORRECTIONS["none"], *_STEPS), seeds=3, seconds=SECONDS),
    *(_build_arm(name, *_CORRECTIONS[name]) for name in ("tis", "opsm", "gsm", "gsm_wide")),
    *(_build_arm(f"late_{name}", *_CORRECTIONS[name], lag=LAG) for name in ("none", "opsm")),
    _build_arm("float32", *_CORRECTIONS["none"], _FLOAT32),
    Arm("unrounded", (*_CORRECTIONS["none"], *_SHORT), seeds=1, seconds=SECONDS // 2),
    Arm("float32_unrounded", (*_CORRECTIONS["none"], *_SHORT, _FLOAT32), seeds=1, seconds=SECONDS // 2),
    *(_build_length_arm(kind, *chosen) for kind, chosen in _LENGTHS.items()),
)


def make(run: Run) -> str:
    """Execute one run and store its steps; return how the run ended."""
    chosen = run.arm.overrides if _FLOAT32 in run.arm.overrides else (*run.arm.overrides, _BFLOAT16)
    overrides, environment = add_lag(run.arm.lag, [*chosen, f"data.seed={run.seed}"])
    if run.setting in UNROUNDED:
        from scripts.quickstart.prepare import make_once
        from scripts.quickstart.smollm2 import build_smollm2

        model = LOGS / "unrounded"
        make_once(model, partial(build_smollm2, rounded=False))
        overrides.append(quote(MODEL_PATH, model))
    environment = {**environment, "TASK": "arithmetic"}
    return make_quickstart(run, overrides, environment, LOGS, DATA, COLUMNS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser(__doc__).parse_args(arguments)
    make_runs(list_runs(ARMS), results.describe_finished(DATA), make, options, f"on two idle cores, verl {TESTED[-1]}")
    return 0


if __name__ == "__main__":
    unwind_when_terminated()
    sys.exit(main())
