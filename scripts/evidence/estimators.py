"""Bias and variance of each correction's policy gradient, by exact enumeration of a small policy.

    python scripts/evidence/estimators.py [--seed 0] [--out outputs/estimators.png]

Prints bias, cosine and variance of every estimator's gradient, compared with the true gradient, at several mismatches;
the bias under staleness; and keep-rates by length. Asserts the claims that should hold exactly, and exits with 1 if a
claim does not hold. The corrections are those of ``recipe.offpolicy.correction``. Only the simulated keep-rates are
sampled.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout's recipe, installed or not

import estimator_claims as claims
import torch
from enumeration import Family, Measurement, World, build, list_options, measure, policies
from estimator_claims import ESTIMATORS, NONE, SELF_NORMALISED, SEQUENCE_IS_FULL
from seeds import ClaimError

from recipe.offpolicy.analysis.plotting import INK, MARKERS, MUTED, apply_style, create_axes, save
from scripts.harness import build_parser, format_markdown

Measured = dict[str, Measurement]
"""Estimator's name -> measurement."""


@dataclass(frozen=True)
class EvidenceSettings:
    """Settings of one run; with 4^6 sequences, a run takes a few seconds.

    Attributes:
        mismatches: standard deviations of mu's logits, ascending; slopes are computed from the two smallest ones.
        plane: the mismatch for the bias-variance figure, one of ``mismatches``.
        stalenesses: standard deviations of pi's parameters; the mismatch is ``stale_mismatch``.
        stale: the staleness at which options are measured; the mismatch is ``plane``.
        worlds: number of additional random policies and mismatches (seeds after ``seed``), which are measured at
            ``plane``.
        rows: number of simulated rows for each keep-rate.
    """

    vocabulary: int = 4
    length: int = 6
    mismatches: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    plane: float = 0.3
    stalenesses: tuple[float, ...] = (0.0, 0.03, 0.1, 0.3)
    stale_mismatch: float = 0.1
    stale: float = 0.1
    lengths: tuple[int, ...] = claims.LENGTHS
    worlds: int = 20
    rows: int = 2000
    seed: int = 0


class Evidence:
    """Measures everything, and asserts the claims that must hold exactly.

    Attributes:
        unit: variance of one row's gradient at mu = pi_old = pi, which is the unit of variances.
        mismatches, stalenesses: level -> measurements.
        biases: estimator's name -> its bias in each world, starting with the world of ``seed``.
        shares: (aggregate, case, length) -> share of simulated rows that is kept.
        sentences: the claims that were asserted, with their figures.

    Raises:
        claims.ClaimError: a claim does not hold.
    """

    def __init__(self, settings: EvidenceSettings) -> None:
        self.settings = settings
        self.world, *others = (
            build(settings.vocabulary, settings.length, settings.seed + other) for other in range(settings.worlds + 1)
        )
        on_policy = policies(self.world, mismatch=0.0, staleness=0.0)
        self.unit = measure(NONE, on_policy).variance
        self.mismatches = {level: measure_all(self.world, level) for level in settings.mismatches}
        self.stalenesses = {
            level: measure_all(self.world, settings.stale_mismatch, level) for level in settings.stalenesses
        }
        at_plane = [self.mismatches[settings.plane], *(measure_all(world, settings.plane) for world in others)]
        self.biases = {e.name: [found[e.name].bias for found in at_plane] for e in ESTIMATORS}
        self.shares = {
            (aggregate, case, length): claims.simulated(
                aggregate, case, length, rows=settings.rows if case.deviation else 1, seed=settings.seed
            )
            for aggregate, case, length in itertools.product(claims.MASKS, claims.CASES, settings.lengths)
        }
        stale = policies(self.world, mismatch=settings.stale_mismatch, staleness=max(settings.stalenesses))
        self.sentences = (
            claims.gradient_agrees(stale),
            claims.on_policy_is_unbiased(on_policy),
            claims.sequence_is_unbiased(self.mismatches, self.stalenesses),
            claims.baselines_stay_unbiased(self.mismatches),
            claims.token_is_is_first_order(self.mismatches),
            claims.clip_fractions(policies(self.world, mismatch=settings.plane, staleness=0.0)),
            claims.products(),
            claims.keep_rates_agree(self.shares, settings.rows),
        )


def measure_all(world: World, mismatch: float, staleness: float = 0.0, *, options: bool = False) -> Measured:
    """Measure the estimators or, if ``options``, every option of the group correction."""
    setting = policies(world, mismatch=mismatch, staleness=staleness)
    # Some options are meant for answers of several turns.
    return {
        each.name: measure(each, setting, turns=1 + options) for each in (list_options() if options else ESTIMATORS)
    }


def report(evidence: Evidence) -> None:
    """Print all tables and sentences."""
    settings, plane = evidence.settings, evidence.settings.plane
    cells: dict[str, Callable[[Measurement], str]] = {
        "bias": lambda m: number(m.bias),
        "cosine": lambda m: "-" if math.isnan(m.cosine) else f"{m.cosine:.3f}",
        "variance": lambda m: f"{m.variance / evidence.unit:.2f}",
        "score mean": lambda m: number(m.score_mean),
        "drift": lambda m: number(m.score_mean),
        "removed": lambda m: f"{m.dropped:.3f}",
        "rows": lambda m: f"{m.break_even:,.0f}" if m.bias > 1e-10 else "-",
    }

    def show(title: str, headings: Sequence[str], rows: Any) -> None:
        print("\n".join(["", title, "", *format_markdown(headings, rows)]))

    def show_all(title: str, what: str, found: Mapping[str, Measurement], *columns: str) -> None:
        show(title, [what, *columns], ([name, *(cells[each](m) for each in columns)] for name, m in found.items()))

    at_old = f"pi = pi_old, by mismatch (V = {settings.vocabulary}, T = {settings.length})"
    no_bias = "Score mean |E[sum_t w_t grad log pi_t]|, 0 = baselines add no bias"
    for title, levels, kind in (
        (f"Bias |E[g] - grad J| / |grad J|; {at_old}", evidence.mismatches, "bias"),
        (f"Cosine of E[g] and grad J; {at_old}", evidence.mismatches, "cosine"),
        (f"Variance of one row's gradient, 1 = on-policy; {at_old}", evidence.mismatches, "variance"),
        (f"{no_bias}; {at_old}", evidence.mismatches, "score mean"),
        (f"Bias; mismatch {settings.stale_mismatch:g}, by staleness of pi", evidence.stalenesses, "bias"),
    ):
        rows = [[e.name, *(cells[kind](found[e.name]) for found in levels.values())] for e in ESTIMATORS]
        show(title, ["estimator", *(f"{level:g}" for level in levels)], rows)
    legend = "removed: share of tokens; rows: batch whose standard error is the bias"
    columns = ("bias", "cosine", "variance", "score mean", "removed", "rows")
    show_all(f"pi = pi_old at mismatch {plane:g}; {legend}", "estimator", evidence.mismatches[plane], *columns)
    for staleness, where in ((0.0, ""), (settings.stale, f", pi stale by {settings.stale:g}")):
        title = f"Every option of the group correction at mismatch {plane:g}{where}; drift: the score mean"
        found = measure_all(evidence.world, plane, staleness, options=True)
        show_all(title, "option", found, "bias", "cosine", "variance", "drift", "removed")
    nones, rows = evidence.biases[NONE.name], []
    for name, biases in evidence.biases.items():
        below = sum(bias < none for bias, none in zip(biases, nones, strict=True))
        ordered = [number(each(biases)) for each in (statistics.median, min, max)]
        rows.append([name, *ordered, f"{below} of {len(nones)}"])
    over = f"Bias at mismatch {plane:g}, pi = pi_old, over {len(nones)} seeds"
    show(over, ["estimator", "median", "least", "greatest", "below none"], rows)
    rows = []
    for (aggregate, (lower, upper)), case in itertools.product(claims.MASKS.items(), claims.CASES):
        keys = [(aggregate, case, length) for length in settings.lengths]
        kept = [f"{claims.expected(*key):.2f} ({evidence.shares[key]:.2f})" for key in keys]
        rows.append([f"{aggregate} [{lower:g}, {upper:g}]", case.name, *kept])
    title = f"Rows kept by length: normal distribution (of {settings.rows} simulated rows, shipped masks)"
    show(title, ["mask", "log-ratio a token", *(f"T = {length}" for length in settings.lengths)], rows)
    print("", *(f"holds: {sentence}" for sentence in evidence.sentences), sep="\n")


def number(value: float) -> str:
    """Format a number with two digits; rounding errors are shown as 0."""
    return "0" if value < 1e-10 else f"{value:.2g}"


# --- figure

COLOURS: dict[Family, str] = {
    "none": INK,
    "token weight": "#2563eb",
    "sequence weight": "#059669",
    "mask": "#d97706",
    "both": "#9333ea",
}
DASHES = ("-", "--", ":", "-.")
FLOOR = 1e-3  # biases below this are not drawn
# At pi = pi_old, these two estimators coincide with sequence IS.
DRAWN = tuple(estimator for estimator in ESTIMATORS if estimator not in (SELF_NORMALISED, SEQUENCE_IS_FULL))
# Token weights share a line, and masks that remove nothing lie on the line of no correction, so only one or two of each
# are drawn.
GROWING = (
    "none", "token TIS, cap 2", "sequence TIS, cap 5", "geometric weight", "geometric mask [0.99, 1.01]",
    "product mask [0.5, 2]", "OPSM, delta=0.1",
)  # fmt: skip


def draw(evidence: Evidence, path: Path) -> None:
    """Write a PNG, and create its folder if necessary."""
    with apply_style():
        figure, (growth, plane, kept, names) = create_axes(2, 2, width=10, height=9)
        draw_growth(evidence, growth)
        draw_plane(evidence, plane)
        draw_kept(evidence, kept)
        # The legend of the other panels is in a separate panel, where it does not hide anything.
        names.set_axis_off()
        look: Any = {"alignment": "left", "frameon": False, "fontsize": 8.5, "columnspacing": 1.0}
        for panel, title, place, y, columns in (
            (plane, "Above", "upper left", 1.08, 2),
            (kept, "Rows kept by length", "lower left", -0.08, 1),
        ):
            handles, labels = panel.get_legend_handles_labels()
            where: Any = {"loc": place, "bbox_to_anchor": (0, y), "ncols": columns}
            legend = names.legend(handles, labels, title=title, **where, **look)
            legend.set_in_layout(False)  # the widths of the panels do not change
            names.add_artist(legend)
    save(figure, path, dpi=110)


def list_styles() -> dict[str, dict[str, Any]]:
    """Assign a marker to each family and a colour to each estimator, starting with those whose curves are drawn."""
    from matplotlib import colormaps

    shades = colormaps["tab20"](range(20))
    colours = [*shades[::2], *shades[1::2]]  # the strong ones first
    ordered = sorted(DRAWN, key=lambda estimator: estimator.name not in GROWING)
    families = list(COLOURS)
    return {
        estimator.name: {"color": colour, "marker": MARKERS[families.index(estimator.family)], "markersize": 6}
        for estimator, colour in zip(ordered, colours, strict=False)
    }


def draw_growth(evidence: Evidence, axes: Any) -> None:
    styles = list_styles()
    for name in GROWING:
        biases = [found[name].bias for found in evidence.mismatches.values()]
        visible = [bias if bias >= FLOOR else math.nan for bias in biases]
        axes.plot(list(evidence.mismatches), visible, linewidth=1.2, alpha=0.85, **styles[name])
    axes.set(
        xscale="log", yscale="log", ylim=(FLOOR, None), title="Bias grows with the mismatch",
        xlabel="mismatch: std of mu's logits about pi_old's", ylabel="|E[g] − ∇J| / |∇J|",
    )  # fmt: skip
    axes.text(
        0.97, 0.03, "sequence IS: 0 to rounding; with cap 5,\ntoo, until the cap binds", ha="right", va="bottom",
        color=styles["sequence TIS, cap 5"]["color"], transform=axes.transAxes, fontsize=8.5,
    )  # fmt: skip


def draw_plane(evidence: Evidence, axes: Any) -> None:
    level = evidence.settings.plane
    for name, style in list_styles().items():
        m = evidence.mismatches[level][name]
        look: Any = style | {"markersize": 9, "linestyle": "none", "alpha": 0.8}
        axes.plot(m.bias, m.variance / evidence.unit, label=name, **look)
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle=":")
    axes.set(
        xlim=(-0.04, None), yscale="log", title=f"Bias against variance at mismatch {level:g}",
        xlabel="|E[g] − ∇J| / |∇J|", ylabel="variance of one row's gradient, 1 = on-policy",
    )  # fmt: skip


def draw_kept(evidence: Evidence, axes: Any) -> None:
    measured = evidence.settings.lengths
    lengths = sorted({round(10 * (max(measured) / 10) ** (step / 120)) for step in range(121)})
    for aggregate, colour in (("geometric", COLOURS["mask"]), ("product", COLOURS["token weight"])):
        lower, upper = claims.MASKS[aggregate]
        for case, dashes in zip(claims.CASES, DASHES, strict=True):
            shares = [claims.expected(aggregate, case, length) for length in lengths]
            label = f"{aggregate} [{lower:g}, {upper:g}], {case.name}"
            axes.plot(lengths, shares, color=colour, linestyle=dashes, linewidth=1.6, label=label)
            if case.deviation:
                dots = [evidence.shares[aggregate, case, length] for length in measured]
                axes.plot(measured, dots, "o", color=colour, markersize=4.5)
    axes.set(
        xscale="log", ylim=(-0.03, 1.03), title="Rows kept by length", xlabel="T, tokens a row",
        ylabel="share kept (dots: simulated, shipped masks)",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None, settings: EvidenceSettings | None = None) -> int:
    """Run the command; return 0, or 1 if a claim that must hold exactly does not hold.

    Args:
        settings: a smaller world for tests; ``--seed`` overrides its seed.
    """
    parser = build_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of policy, mismatch and simulated rows (default 0)")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "estimators.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    try:
        evidence = Evidence(replace(settings or EvidenceSettings(), seed=options.seed))
    except ClaimError as error:
        print(f"does NOT hold: {error}")
        return 1
    report(evidence)
    draw(evidence, options.out)
    print(f"picture: {options.out}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same summation order on every machine
    sys.exit(main())
