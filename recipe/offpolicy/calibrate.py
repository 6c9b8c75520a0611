"""Bounds for a target kept share or effective sample size, from a recording:

python -m recipe.offpolicy.calibrate DIR --spec 'correction=[tis_token,gsm]' --target-kept 0.98 --target-ess 0.9

Exit status: 0, 1 where a bound was not found, 2 where the recording or an argument is no good.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .analysis.calibration.defaults import QUANTILE, ROUNDING
from .command_line import need, needed_to_show, run

if TYPE_CHECKING:
    from .analysis.calibration.joint import Joint
    from .analysis.calibration.propose import Calibrated
    from .correction import CorrectionSpec
    from .recording import Recording

USAGE, UNREACHED = 2, 1
"""Exit status: what was asked for cannot be meant, and no bound was found for a part of it."""
_PIPE_WIDTH = 200


def asked(recording: Recording, spec: Sequence[str]) -> tuple[CorrectionSpec, frozenset[str]]:
    """The correction that overrides compose, or that acted at the last recorded step, and its keys without a value.

    Raises:
        SpecError: it is malformed, or there is none.
        RecordingError: the recording cannot be read.
    """
    from .analysis.calibration.parts import placeholders
    from .analysis.whatif.composed import composed_mapping, composer
    from .correction import CorrectionSpec, SpecError

    if spec:
        with composer():
            values, unset = placeholders(composed_mapping(spec))
    else:
        values, unset = dict(recording.parts(recording.steps[-1])[-1].spec), frozenset()
    correction = CorrectionSpec.from_mapping(values)
    if not spec and correction.weight is None and not correction.masks:
        raise SpecError(
            "recorded without a weight or mask, so that there is no bound to set. Name a correction: "
            "--spec 'correction=[tis_token,gsm]'."
        )
    return correction, unset


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    shown = needed_to_show(json=options.json, png=bool(options.png), html=bool(options.html))
    need("calibrate", "numpy", "torch", "pyarrow", "hydra", *shown)
    import torch

    from .analysis.attribution.first import Screen
    from .analysis.calibration.joint import joint
    from .analysis.calibration.propose import Request, calibrated
    from .analysis.pages import PageError, check_target
    from .correction import SpecError
    from .recording import Recording, RecordingError

    # Blocks fit the cache: a second thread adds little, and waits for the first at each of some hundred operations.
    torch.set_num_threads(1)
    request = Request(
        target_kept=options.target_kept,
        target_ess=options.target_ess,
        of=options.of,
        confidence=options.confidence,
        by_length=options.by_length,
        floor_quantile=options.floor_quantile,
        rounding=options.rounding,
    )
    try:
        request.check()
        if options.png:
            check_target("--png", options.png, "calibration.png")
        if options.html:
            check_target("--html", options.html, "calibration.html")
        recording = Recording(options.directory)
        card = recording.card  # a damaged one is said before the work
        spec, unset = asked(recording, options.spec)
        screen = Screen(recording.steps)
        result = calibrated(screen.watching(recording), spec, request, unset)
        faults = screen.mend_first(card)
        now = None if unset else joint(recording, spec)
        then = joint(recording, result.spec)
        _show(options, result, now, then, faults)
    except BrokenPipeError:
        raise
    except (RecordingError, SpecError, PageError, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)  # noqa: T201
        return USAGE
    missing = [p for p in result.proposals if not p.found and p.threshold.outcome != "not needed"]
    return UNREACHED if missing else 0


def _show(options: argparse.Namespace, result: Calibrated, now: Joint | None, then: Joint, faults: str) -> None:
    from .analysis.calibration.tables import by_length, overrides, overview, plain, remarks, together

    confidence = options.confidence
    if options.png is not None:
        from .analysis.calibration.drawings import curves
        from .analysis.pages.figures import save

        save(curves(result.proposals, confidence), options.png)
    if options.html is not None:
        _page(options, result, now, then, faults).write(options.html)
    if options.json:
        print(json.dumps(plain(result, now, then, confidence) | {"mend_first": faults or None}, indent=2))  # noqa: T201
        return
    from rich.console import Console

    from .analysis.pages import fitted

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    if faults:
        console.print(faults, markup=False, soft_wrap=not sys.stdout.isatty())
    lengths = [by_length(proposal, confidence) for proposal in result.proposals if proposal.lengths]
    for table in (overview(result, confidence), *lengths, together(now, then)):
        console.print(*fitted(table, console.width), sep="\n")
    for remark in remarks(result, confidence):
        # A line each for other programs, and whole words for a reader.
        console.print(remark, markup=False, soft_wrap=not sys.stdout.isatty())
    if pasted := overrides(result):
        console.print("\nOverrides:", "    " + shlex.join(pasted), sep="\n", markup=False, soft_wrap=True)


def _page(options: argparse.Namespace, result: Calibrated, now: Joint | None, then: Joint, faults: str) -> Any:
    from .analysis.calibration.drawings import panels as drawn
    from .analysis.calibration.tables import by_length, overrides, overview, remarks, together
    from .analysis.pages import Page, code, panels, paragraph, table

    confidence = options.confidence
    page = Page("Calibration", str(options.directory))
    if faults:
        page.section("Mend first", paragraph(faults))
    page.section(
        "Proposed",
        table(overview(result, confidence)),
        code(" \\\n".join(map(shlex.quote, overrides(result))) or "none"),
    )
    page.section("Curves", panels(drawn(result.proposals, confidence)))
    lengths = [table(by_length(proposal, confidence)) for proposal in result.proposals if proposal.lengths]
    if lengths:
        page.section("By length", *lengths)
    page.section("Remarks", *(paragraph(remark) for remark in remarks(result, confidence)), table(together(now, then)))
    return page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipe.offpolicy.calibrate", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="of offpolicy.record.dir")
    add("--spec", nargs="+", default=[], metavar="OVERRIDE", help="Hydra overrides; default: what was recorded")
    add("--target-kept", type=float, metavar="P", help="share that each mask is to keep of what it looks at")
    add("--target-ess", type=float, metavar="P", help="effective sample size of the weight, as a share of tokens")
    add("--of", metavar="KEY", help="one part or bound, such as masks.gsm or masks.gsm.upper; default: all")
    add("--by-length", action="store_true", help="advice by length also where it does not matter: one bound acts")
    add("--confidence", type=float, default=0.95, metavar="P", help="of intervals, default %(default)s")
    add("--floor-quantile", type=float, default=QUANTILE, metavar="P", help="of backend noise, which delta exceeds")
    add("--rounding", type=float, default=ROUNDING, metavar="NATS", help="|log pi - log pi_old| taken for rounding")
    add("--png", type=Path, metavar="FILE", help="calibration curves")
    add("--html", type=Path, metavar="FILE", help="one self-contained page")
    add("--json", action="store_true", help="JSON to stdout in place of tables")
    return parser


if __name__ == "__main__":
    sys.exit(run("calibrate", main))
