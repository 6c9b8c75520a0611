"""The table and the picture at the end of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from metrics import ESS, KEPT, KL, REWARD, SECONDS, History
from rich.table import Table

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, GREY = "#2563eb", "#d97706", "#059669", "#9aa5b1"


def number(value: float, digits: int = 3) -> str:
    """A value for a table; a dash for NaN, powers of ten for the very small."""
    if math.isnan(value):
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"


def describe(correction: dict[str, Any]) -> str:
    """The configured correction in a few words, for instance "token weights (truncate), masks gsm and opsm"."""
    parts = []
    if weight := correction.get("weight"):
        parts.append(f"{weight['level']} weights ({weight['kind']})")
    if masks := correction.get("masks"):
        parts.append(f"mask{'s' if len(masks) > 1 else ''} {' and '.join(masks)}")
    if correction.get("proximal", "recompute") != "recompute":
        parts.append(f"pi_old by {correction['proximal']}")
    if correction.get("kl_clip"):
        parts.append("clipped KL")
    return ", ".join(parts) or "uncorrected"


def summary_table(history: History, *, corrected: bool) -> Table:
    """First and last value of what matters."""
    table = Table(title="Quickstart", title_style="bold", min_width=56)
    for heading, justify in (("", "left"), ("first", "right"), ("last", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    heldout = history.heldout
    if heldout:
        table.add_row("held-out score, greedy", number(heldout[0][1]), number(heldout[-1][1]), style="bold")
    rows = [("reward, sampled", REWARD), ("mismatch KL (k3)", KL), ("effective sample size", ESS), ("kept share", KEPT)]
    for label, keys in [*rows, ("seconds a step", SECONDS)]:
        values = [value for value in history.series(keys) if not math.isnan(value)]
        table.add_row(label, number(values[0]) if values else "-", number(values[-1]) if values else "-")
    proof = "none configured" if not corrected else "yes" if history.proved else "NO"
    table.add_row("correction proved live", "", proof)
    return table


def draw(history: History, path: Path, subtitle: str) -> None:
    """Reward, mismatch and kept share over the steps, as a PNG.

    Args:
        subtitle: what was trained with which correction, below the title.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    style: Any = {
        "font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": INK, "xtick.color": MUTED, "ytick.color": MUTED,
        "axes.titleweight": "bold", "axes.titlecolor": INK, "axes.titlelocation": "left", "text.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
        "axes.axisbelow": True,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, (reward, mismatch, kept) = pyplot.subplots(1, 3, figsize=(13, 4.1), layout="constrained")
        steps = history.steps

        reward.plot(steps, history.series(REWARD), color=BLUE, alpha=0.35, linewidth=1.2, label="sampled, each step")
        reward.plot(steps, smooth(history.series(REWARD)), color=BLUE, linewidth=2.2, label="sampled, running mean")
        if heldout := history.heldout:
            reward.plot(*zip(*heldout, strict=True), "o", color=ORANGE, markersize=8, label="held out, greedy")
            for position, (step, score) in enumerate(heldout):
                reward.annotate(
                    f"{score:.2f}", (step, score), textcoords="offset points", color=ORANGE, fontweight="bold",
                    xytext=(-2, -17) if position == 0 else (2, 9), ha="left" if position == 0 else "right",
                )  # fmt: skip
        reward.set(title="Reward", ylim=(0, 1.05), ylabel="mean reward of a response")
        reward.legend(frameon=False, loc="lower right")

        kl = history.series(KL)
        # The power of ten goes into the label: matplotlib's own would push the title up.
        power = exponent(kl)
        mismatch.plot(steps, [value / 10.0**power for value in kl], color=ORANGE, linewidth=2)
        unit = f", $10^{{{power}}}$ nats" if power else ", nats"
        mismatch.set(title="Mismatch of trainer and engine", ylabel=f"KL (k3) per token{unit}")
        mismatch.set_ylim(bottom=0)

        kept.plot(steps, history.series(KEPT), color=GREEN, linewidth=2, label="tokens kept by the masks")
        kept.plot(steps, history.series(ESS), color=GREY, linewidth=1.6, linestyle="--", label="effective sample size")
        lowest = min((v for v in history.series(KEPT) + history.series(ESS) if not math.isnan(v)), default=0.0)
        floor = max(0.0, math.floor((lowest - 0.04) * 20) / 20)
        kept.set(title="Kept share", ylim=(floor, 1 + 0.04 * (1 - floor)))
        kept.legend(frameon=False, loc="lower right")

        for axes in (reward, mismatch, kept):
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(subtitle, x=0.01, ha="left", fontsize=11, color=MUTED)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def exponent(values: list[float]) -> int:
    """The power of ten to label an axis with; 0 when numbers between 0.1 and 1000 say it better."""
    largest = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
    return math.floor(math.log10(largest)) if largest and not 0.1 <= largest < 1000 else 0


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Mean of each value and up to width - 1 before it; NaN does not count."""
    result = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if not math.isnan(value)]
        result.append(sum(window) / len(window) if window else math.nan)
    return result
