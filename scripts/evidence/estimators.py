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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout's recipe, installed or not

import estimator_claims as claims
import torch
from enumeration import Family, Measurement, World, build, list_options, measure, policies
from estimator_claims import ESTIMATORS, NONE, SELF_NORMALISED, SEQUENCE_IS_FULL
from rich.console import Console
from rich.table import Table
from seeds import ClaimError

from recipe.offpolicy.analysis.plotting import INK, MARKERS, MUTED, apply_style, create_axes, save
from scripts.harness import build_parser

WIDTH = 120
Shares = dict[tuple[str, claims.LogRatio, int], float]
"""(aggregate, case, length) -> share of simulated rows that is kept."""


@dataclass(frozen=True)
class EvidenceSettings:
    """Settings of one run; with 4^6 sequences, a run takes a few seconds.

    Attributes:
        mismatches: standard deviations of mu's logits, ascending; slopes are computed from the two smallest ones.
        plane: the mismatch for the bias-variance figure, one of ``mismatches``.
        stalenesses: standard deviations of pi's parameters; the mismatch is ``stale_mismatch``.
        stale: the staleness at which options are measured; the mismatch is ``plane``.
        worlds: number of further policies and mismatches, with the seeds that follow ``seed``, measured at ``plane``.
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


@dataclass(frozen=True)
class Evidence:
    """Results of one run.

    Attributes:
        on_policy_variance: variance of one row's gradient at mu = pi_old = pi, which is the unit of variances.
        mismatches, stalenesses: level -> estimator's name -> measurement.
        biases: estimator's name -> its bias in each world, starting with the world of ``seed``.
        sentences: the claims that were asserted, with their figures.
        options, stale_options: every option of the group ``correction`` at mismatch ``plane``: with pi = pi_old, and
            with stale pi.
    """

    settings: EvidenceSettings
    on_policy_variance: float
    mismatches: dict[float, dict[str, Measurement]]
    stalenesses: dict[float, dict[str, Measurement]]
    biases: dict[str, list[float]]
    shares: Shares
    sentences: tuple[str, ...]
    options: dict[str, Measurement]
    stale_options: dict[str, Measurement]


def collect(settings: EvidenceSettings) -> Evidence:
    """Measure everything, and assert the claims that must hold exactly.

    Raises:
        claims.ClaimError: a claim does not hold.
    """
    world = build(settings.vocabulary, settings.length, settings.seed)
    on_policy = policies(world, mismatch=0.0, staleness=0.0)
    mismatches = {level: _measurements(world, level, 0.0) for level in settings.mismatches}
    stalenesses = {level: _measurements(world, settings.stale_mismatch, level) for level in settings.stalenesses}
    elsewhere = [
        _measurements(build(settings.vocabulary, settings.length, settings.seed + other), settings.plane, 0.0)
        for other in range(1, settings.worlds + 1)
    ]
    biases = {e.name: [row[e.name].bias for row in (mismatches[settings.plane], *elsewhere)] for e in ESTIMATORS}
    shares = {}
    for key in itertools.product(claims.MASKS, claims.CASES, settings.lengths):
        rows = settings.rows if key[1].deviation else 1
        shares[key] = claims.simulated(*key, rows=rows, seed=settings.seed)
    sentences = (
        claims.gradient_agrees(policies(world, mismatch=settings.stale_mismatch, staleness=max(settings.stalenesses))),
        claims.on_policy_is_unbiased(on_policy),
        claims.sequence_is_unbiased(mismatches, stalenesses),
        claims.baselines_stay_unbiased(mismatches),
        claims.token_is_is_first_order(mismatches),
        claims.clip_fractions(policies(world, mismatch=settings.plane, staleness=0.0)),
        claims.products(),
        claims.keep_rates_agree(claims.CASES, settings.lengths, settings.rows, lambda *key: shares[key]),
    )
    return Evidence(
        settings=settings,
        on_policy_variance=measure(NONE, on_policy).variance,
        mismatches=mismatches,
        stalenesses=stalenesses,
        biases=biases,
        shares=shares,
        sentences=sentences,
        options=_measurements(world, settings.plane, 0.0, options=True),
        stale_options=_measurements(world, settings.plane, settings.stale, options=True),
    )


def _measurements(world: World, mismatch: float, staleness: float, *, options: bool = False) -> dict[str, Measurement]:
    setting = policies(world, mismatch=mismatch, staleness=staleness)
    measured = list_options() if options else ESTIMATORS
    # Some options are meant for answers of several turns.
    return {each.name: measure(each, setting, turns=1 + options) for each in measured}


# --- tables


def report(evidence: Evidence, console: Console) -> None:
    """Print all tables and sentences."""
    settings, plane = evidence.settings, evidence.settings.plane
    cells: dict[str, Callable[[Measurement], str]] = {
        "bias": lambda m: number(m.bias),
        "cosine": lambda m: "-" if math.isnan(m.cosine) else f"{m.cosine:.3f}",
        "variance": lambda m: f"{m.variance / evidence.on_policy_variance:.2f}",
        "score mean": lambda m: number(m.score_mean),
        "removed": lambda m: f"{m.dropped:.3f}",
        "rows": lambda m: f"{m.break_even:,.0f}" if m.bias > 1e-10 else "-",
    }
    cells["drift"] = cells["score mean"]

    def show(title: str, left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = Table(*left, title=title, title_style="bold", title_justify="left")
        for heading in right:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def show_all(title: str, what: str, found: Mapping[str, Measurement], *headings: str) -> None:
        show(title, [what], headings, ([name, *(cells[each](m) for each in headings)] for name, m in found.items()))

    at_old = f"pi = pi_old, by mismatch (V = {settings.vocabulary}, T = {settings.length})"
    no_bias = "Score mean |E[sum_t w_t grad log pi_t]|, 0 = baselines add no bias"
    for title, levels, kind in (
        (f"Bias |E[g] - grad J| / |grad J|; {at_old}", evidence.mismatches, "bias"),
        (f"Cosine of E[g] and grad J; {at_old}", evidence.mismatches, "cosine"),
        (f"Variance of one row's gradient, 1 = on-policy; {at_old}", evidence.mismatches, "variance"),
        (f"{no_bias}; {at_old}", evidence.mismatches, "score mean"),
        (f"Bias; mismatch {settings.stale_mismatch:g}, by staleness of pi", evidence.stalenesses, "bias"),
    ):
        rows = [[e.name, *(cells[kind](row[e.name]) for row in levels.values())] for e in ESTIMATORS]
        show(title, ["estimator"], [f"{level:g}" for level in levels], rows)
    legend = "removed: share of tokens; rows: batch whose standard error is the bias"
    headings = ("bias", "cosine", "variance", "score mean", "removed", "rows")
    show_all(f"pi = pi_old at mismatch {plane:g}; {legend}", "estimator", evidence.mismatches[plane], *headings)
    for found, where in ((evidence.options, ""), (evidence.stale_options, f", pi stale by {settings.stale:g}")):
        title = f"Every option of the group correction at mismatch {plane:g}{where}; drift: the score mean"
        show_all(title, "option", found, "bias", "cosine", "variance", "drift", "removed")
    nones, rows = evidence.biases[NONE.name], []
    for name, biases in evidence.biases.items():
        below = sum(bias < none for bias, none in zip(biases, nones, strict=True))
        ordered = [number(each(biases)) for each in (statistics.median, min, max)]
        rows.append([name, *ordered, f"{below} of {len(nones)}"])
    over = f"Bias at mismatch {plane:g}, pi = pi_old, over {len(nones)} seeds"
    show(over, ["estimator"], ["median", "least", "greatest", "below none"], rows)
    rows = []
    for (aggregate, (lower, upper)), case in itertools.product(claims.MASKS.items(), claims.CASES):
        keys = [(aggregate, case, length) for length in settings.lengths]
        kept = [f"{claims.expected(*key):.2f} ({evidence.shares[key]:.2f})" for key in keys]
        rows.append([f"{aggregate} [{lower:g}, {upper:g}]", case.name, *kept])
    title = f"Rows kept by length: normal distribution (of {settings.rows} simulated rows, shipped masks)"
    show(title, ["mask", "log-ratio a token"], [f"T = {length}" for length in settings.lengths], rows)
    for sentence in evidence.sentences:
        console.print(f"holds: {sentence}", highlight=False)


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
        _growth(evidence, growth)
        _plane(evidence, plane)
        _kept(evidence, kept)
        _names(names, above=plane, alongside=kept)
    save(figure, path, dpi=110)


def _names(axes: Any, *, above: Any, alongside: Any) -> None:
    """Draw the legend of the other panels in a separate panel, where it does not hide anything."""
    axes.set_axis_off()
    look: Any = {"alignment": "left", "frameon": False, "fontsize": 8.5, "columnspacing": 1.0}
    for panel, title, place, y, columns in (
        (above, "Above", "upper left", 1.08, 2),
        (alongside, "Rows kept by length", "lower left", -0.08, 1),
    ):
        known = panel.get_legend_handles_labels()
        legend = axes.legend(*known, loc=place, bbox_to_anchor=(0, y), title=title, ncols=columns, **look)
        # The widths of the panels do not change.
        legend.set_in_layout(False)
        axes.add_artist(legend)


def _styles() -> dict[str, dict[str, Any]]:
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
        lower, upper = claims.MASKS[aggregate]
        for case, dashes in zip(claims.CASES, DASHES, strict=True):
            shares = [claims.expected(aggregate, case, length) for length in lengths]
            label = f"{aggregate} [{lower:g}, {upper:g}], {case.name}"
            axes.plot(lengths, shares, color=colour, linestyle=dashes, linewidth=1.6, label=label)
            if case.deviation:
                dots = [evidence.shares[aggregate, case, length] for length in evidence.settings.lengths]
                axes.plot(evidence.settings.lengths, dots, "o", color=colour, markersize=4.5)
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
    console = Console(width=WIDTH, markup=False)
    try:
        evidence = collect(replace(settings or EvidenceSettings(), seed=options.seed))
    except ClaimError as error:
        console.print(f"does NOT hold: {error}", highlight=False)
        return 1
    report(evidence, console)
    draw(evidence, options.out)
    console.print(f"picture: {options.out}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same summation order on every machine
    sys.exit(main())
