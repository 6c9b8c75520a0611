"""Figure of the scores by eta, a panel a rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .stale_claims import Scores
from .stale_training import ARMS, ETAS, STEPS

_COLOURS = {"bypass": "#d97706", "resampling": "#7b8794", "decoupled_ppo": "#2563eb"}
_LABELS = {
    "bypass": "bypass: clip around mu",
    "resampling": "resampling: pi_old recomputed, no weight",
    "decoupled_ppo": "decoupled_ppo: pi_old recomputed, weight of cap 5",
}


def draw(scores: Scores, rates: Sequence[float], path: Path) -> None:
    """Write a PNG; create its folder. Lines are means over seeds, points the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, panels = pyplot.subplots(1, len(rates), figsize=(5 * len(rates), 4.4), sharey=True, layout="constrained")
    for axes, rate in zip(np.atleast_1d(panels), rates, strict=True):
        for arm in ARMS:
            of = [scores[arm, eta, rate] for eta in ETAS]
            places = range(len(ETAS))
            axes.plot(places, [np.mean(each) for each in of], color=_COLOURS[arm], marker="o", label=_LABELS[arm])
            for place, each in zip(places, of, strict=True):
                axes.plot([place] * len(each), each, ".", color=_COLOURS[arm], alpha=0.35)
        axes.set_xticks(range(len(ETAS)), ["none" if math.isinf(eta) else f"{eta:g}" for eta in ETAS])
        axes.set(title=f"Learning rate {rate:g}", xlabel="eta: batches that sampling is ahead by", ylim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(panels)[0].set_ylabel(f"mean reward after {STEPS} steps")
    figure.legend(*np.atleast_1d(panels)[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    # No version and no date in the file, so that equal figures make equal files.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
