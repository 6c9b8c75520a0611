"""Figure of the estimators: bias by mismatch, bias against variance, rows kept by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keep_rates
from estimator_catalogue import ESTIMATORS, SELF_NORMALISED, SEQUENCE_IS_FULL, Family
from estimator_evidence import Evidence

from recipe.offpolicy.analysis.pages.plotting import INK, MARKERS, MUTED, apply_style, create_axes, save

COLOURS: dict[Family, str] = {
    "none": INK,
    "token weight": "#2563eb",
    "sequence weight": "#059669",
    "mask": "#d97706",
    "both": "#9333ea",
}
DASHES = ("-", "--", ":", "-.")
FLOOR = 1e-3  # biases below are not drawn
# At pi = pi_old these two coincide with sequence IS.
DRAWN = tuple(estimator for estimator in ESTIMATORS if estimator not in (SELF_NORMALISED, SEQUENCE_IS_FULL))
# Token weights lie on one line, masks that remove nothing on that of no correction: one or two of each will do.
GROWING = (
    "none", "token TIS, cap 2", "sequence TIS, cap 5", "geometric weight", "geometric mask [0.99, 1.01]",
    "product mask [0.5, 2]", "OPSM, delta=0.1",
)  # fmt: skip


def draw(evidence: Evidence, path: Path) -> None:
    """Write a PNG; create its folder."""
    with apply_style():
        figure, (growth, plane, kept, names) = create_axes(2, 2, width=10, height=9)
        _growth(evidence, growth)
        _plane(evidence, plane)
        _kept(evidence, kept)
        _names(names, above=plane, alongside=kept)
    save(figure, path, dpi=110)


def _names(axes: Any, *, above: Any, alongside: Any) -> None:
    """Draw the legend of the other panels in a panel of its own, where it hides nothing."""
    axes.set_axis_off()
    for panel, title, place, columns in (
        (above, "Above", "upper left", 2),
        (alongside, "Rows kept by length", "lower left", 1),
    ):
        legend = axes.legend(
            *panel.get_legend_handles_labels(), loc=place, bbox_to_anchor=(0, 1.08 if place == "upper left" else -0.08),
            title=title, alignment="left", frameon=False, ncols=columns, fontsize=8.5, columnspacing=1.0,
        )  # fmt: skip
        # The panels keep their widths.
        legend.set_in_layout(False)
        axes.add_artist(legend)


def _styles() -> dict[str, dict[str, Any]]:
    """Assign a marker to each family and a colour to each estimator, those whose curves are drawn first."""
    from matplotlib import colormaps

    shades = colormaps["tab20"](range(20))
    colours = [*shades[::2], *shades[1::2]]  # the strong ones first
    ordered = sorted(DRAWN, key=lambda estimator: estimator.name not in GROWING)
    families = list(COLOURS)
    return {
        estimator.name: {"color": colour, "marker": MARKERS[families.index(estimator.family)], "markersize": 6}
        for estimator, colour in zip(ordered, colours, strict=False)
    }


def _growth(evidence: Evidence, axes: Any) -> None:
    styles = _styles()
    for name in GROWING:
        points = [(level, row[name].bias) for level, row in evidence.mismatches.items()]
        visible = [(level, bias if bias >= FLOOR else float("nan")) for level, bias in points]
        axes.plot(*zip(*visible, strict=True), linewidth=1.2, alpha=0.85, **styles[name])
    axes.set(
        xscale="log", yscale="log", ylim=(FLOOR, None), title="Bias grows with the mismatch",
        xlabel="mismatch: std of mu's logits about pi_old's", ylabel="|E[g] − ∇J| / |∇J|",
    )  # fmt: skip
    axes.text(
        0.97, 0.03, "sequence IS: 0 to rounding; with cap 5,\ntoo, until the cap binds", ha="right", va="bottom",
        color=styles["sequence TIS, cap 5"]["color"], transform=axes.transAxes, fontsize=8.5,
    )  # fmt: skip


def _plane(evidence: Evidence, axes: Any) -> None:
    level = evidence.settings.plane
    for name, style in _styles().items():
        measurement = evidence.mismatches[level][name]
        axes.plot(
            measurement.bias, measurement.variance / evidence.on_policy_variance, linestyle="none", alpha=0.8,
            label=name, **(style | {"markersize": 9}),
        )  # fmt: skip
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle=":")
    axes.set(
        xlim=(-0.04, None), yscale="log", title=f"Bias against variance at mismatch {level:g}",
        xlabel="|E[g] − ∇J| / |∇J|", ylabel="variance of one row's gradient, 1 = on-policy",
    )  # fmt: skip


def _kept(evidence: Evidence, axes: Any) -> None:
    longest = max(evidence.settings.lengths)
    lengths = sorted({round(10 * (longest / 10) ** (step / 120)) for step in range(121)})
    for aggregate, colour in (("geometric", COLOURS["mask"]), ("product", COLOURS["token weight"])):
        lower, upper = keep_rates.MASKS[aggregate]
        for case, dashes in zip(keep_rates.CASES, DASHES, strict=True):
            shares = [keep_rates.expected(aggregate, case, length) for length in lengths]
            label = f"{aggregate} [{lower:g}, {upper:g}], {case.name}"
            axes.plot(lengths, shares, color=colour, linestyle=dashes, linewidth=1.6, label=label)
            if case.deviation:
                dots = [evidence.shares[aggregate, case, length] for length in evidence.settings.lengths]
                axes.plot(evidence.settings.lengths, dots, "o", color=colour, markersize=4.5)
    axes.set(
        xscale="log", ylim=(-0.03, 1.03), title="Rows kept by length", xlabel="T, tokens a row",
        ylabel="share kept (dots: simulated, shipped masks)",
    )  # fmt: skip
