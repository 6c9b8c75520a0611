"""Propose bounds from a recording, for a target kept share or a target effective sample size.

python -m recipe.offpolicy.calibrate DIR --spec 'correction=[tis_token,gsm]' --target-kept 0.98 --target-ess 0.9

Exit status: 0; 1 if a bound was not found; 2 if the recording or an argument is invalid.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .analysis.calibration.defaults import QUANTILE
from .command_line import add_jobs, list_output_modules, name_program, require_modules, run

if TYPE_CHECKING:
    from .analysis.calibration.calibration_page import JointShares
    from .analysis.calibration.propose import CalibrationResult
    from .correction import CorrectionSpec
    from .recording import Recording

USAGE, UNREACHED = 2, 1
"""Exit status if an argument or the recording is invalid, and if no bound was found for a part."""


def _build_spec(recording: Recording, spec: Sequence[str]) -> tuple[CorrectionSpec, frozenset[str]]:
    """Build the correction to calibrate; also return its keys that have no value yet.

    The correction is composed from the overrides; without overrides, it is the correction of the last recorded step.

    Raises:
        SpecError: the correction is malformed, or there is none.
        RecordingError: the recording cannot be read.
    """
    from .analysis.calibration.parts import fill_placeholders
    from .analysis.whatif.candidates import compose_correction, initialize_composer
    from .correction import CorrectionSpec, SpecError

    if spec:
        with initialize_composer():
            values, unset = fill_placeholders(compose_correction(spec))
    else:
        values, unset = dict(recording.part(recording.steps[-1], -1).spec), frozenset()
    correction = CorrectionSpec.from_mapping(values)
    if not spec and not correction.all_weights and not correction.masks:
        raise SpecError(
            "the recorded correction has no weight and no mask, so there is no bound to set. Name a correction: "
            "--spec 'correction=[tis_token,gsm]'."
        )
    return correction, unset


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    shown = list_output_modules(json=options.json, png=bool(options.png), html=bool(options.html))
    require_modules("calibrate", "numpy", "torch", "pyarrow", "polars", "xxhash", "hydra", *shown)
    from .analysis.attribution.attribution import describe_recorded_faults
    from .analysis.calibration.calibration_page import compute_joint_shares
    from .analysis.calibration.propose import CalibrationRequest, propose_bounds
    from .analysis.calibration.scores import PromptSample
    from .analysis.jobs import JobsError, prepare_process, read_arguments
    from .analysis.plotting import PageError, check_target
    from .correction import SpecError
    from .recording import Recording, RecordingError

    prepare_process()
    request = CalibrationRequest(
        target_kept=options.target_kept,
        target_ess=options.target_ess,
        confidence=options.confidence,
        floor_quantile=options.floor_quantile,
    )
    try:
        request.check()
        if options.png:
            check_target("--png", options.png, "calibration.png")
        if options.html:
            check_target("--html", options.html, "calibration.html")
        recording = Recording(options.directory)
        card = recording.card  # read first, so that a damaged card fails before the work
        spec, unset = _build_spec(recording, options.spec)
        jobs = read_arguments(options, recording, recording.steps)
        sample = PromptSample.of_recording(recording)
        if sample.sentence:
            print(f"calibrate: {sample.sentence}", file=sys.stderr)  # noqa: T201
        result = propose_bounds(recording, spec, request, unset, sample=sample, jobs=jobs)
        faults = describe_recorded_faults(recording, card, jobs)
        # With a missing value, a correction cannot keep anything, so there is nothing to count.
        *now, then = compute_joint_shares(recording, [*([] if unset else [spec]), result.spec], jobs)
        _show(options, result, now[0] if now else None, then, faults)
    except BrokenPipeError:
        raise
    except (RecordingError, SpecError, PageError, JobsError, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)  # noqa: T201
        return USAGE
    missing = [p for p in result.proposals if not p.found and p.threshold.outcome != "not needed"]
    return UNREACHED if missing else 0


def _show(
    options: argparse.Namespace, result: CalibrationResult, now: JointShares | None, then: JointShares, faults: str
) -> None:
    """Write a figure, a page, JSON or tables, as requested by the options."""
    from .analysis.calibration import calibration_page as tables

    confidence = options.confidence
    if options.png is not None:
        from .analysis.calibration.calibration_page import draw_curves
        from .analysis.plotting import save

        save(draw_curves(result.proposals, confidence), options.png)
    if options.html is not None:
        _page(options, result, now, then, faults).write(options.html)
    if options.json:
        print(json.dumps(tables.build_json(result, now, then, confidence) | {"mend_first": faults or None}, indent=2))  # noqa: T201
        return
    from .analysis.table import open_console, print_blocks

    console = open_console()
    print_blocks(
        console,
        faults,
        tables.build_overview_table(result, confidence),
        *tables.build_length_tables(result, confidence),
        tables.build_joint_table(now, then),
        *tables.format_remarks(result, confidence),
        wrap=True,
    )
    if pasted := tables.list_overrides(result):
        console.print("\nOverrides:", "    " + shlex.join(pasted), sep="\n", markup=False, soft_wrap=True)


def _page(
    options: argparse.Namespace, result: CalibrationResult, now: JointShares | None, then: JointShares, faults: str
) -> Any:
    from .analysis.calibration import calibration_page as tables
    from .analysis.calibration.calibration_page import build_panels
    from .analysis.page import Code, Page

    confidence = options.confidence
    page = Page("Calibration", str(options.directory))
    page.add_section("Fix first", faults)
    pasted = " \\\n".join(map(shlex.quote, tables.list_overrides(result))) or "none"
    page.add_section("Proposed", tables.build_overview_table(result, confidence), Code(pasted))
    page.add_section("Curves", build_panels(result.proposals, confidence))
    page.add_section("By length", *tables.build_length_tables(result, confidence))
    page.add_section("Remarks", *tables.format_remarks(result, confidence), tables.build_joint_table(now, then))
    return page


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=name_program("calibrate"), description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="the recording: the directory named by offpolicy.record.dir")
    add("--spec", nargs="+", default=[], metavar="OVERRIDE", help="Hydra overrides; default: what was recorded")
    add("--target-kept", type=float, metavar="P", help="share of its units that each mask must keep")
    add("--target-ess", type=float, metavar="P", help="effective sample size of the weight, as a share of tokens")
    add("--confidence", type=float, default=0.95, metavar="P", help="confidence of the intervals, default %(default)s")
    add(
        "--floor-quantile",
        type=float,
        default=QUANTILE,
        metavar="P",
        help="quantile of the backend noise that delta must exceed",
    )
    add("--png", type=Path, metavar="FILE", help="calibration curves")
    add("--html", type=Path, metavar="FILE", help="one self-contained page")
    add("--json", action="store_true", help="JSON to stdout instead of tables")
    add_jobs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run("calibrate", main))
