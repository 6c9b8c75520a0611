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
from typing import TYPE_CHECKING

from .analysis.calibration import QUANTILE
from .command_line import add_jobs, list_output_modules, name_program, refuse, require_modules, run

if TYPE_CHECKING:
    from .analysis.calibration.calibration_page import JointShares
    from .analysis.calibration.propose import CalibrationResult
    from .correction import CorrectionSpec
    from .recording import Recording

UNREACHED = 1
"""Exit status if no bound was found for a part."""


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
        return CorrectionSpec.from_mapping(values), unset
    recorded = CorrectionSpec.from_mapping(recording.part(recording.steps[-1], -1).spec)
    if not recorded.all_weights and not recorded.masks:
        raise SpecError(
            "the recorded correction has no weight and no mask, so there is no bound to set. Name a correction: "
            "--spec 'correction=[tis_token,gsm]'."
        )
    return recorded, frozenset()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    outputs = list_output_modules(options)
    require_modules("calibrate", "numpy", "torch", "pyarrow", "polars", "xxhash", "hydra", *outputs)
    from .analysis.attribution.attribution import describe_recorded_faults
    from .analysis.calibration.calibration_page import compute_joint_shares
    from .analysis.calibration.propose import CalibrationRequest, propose_bounds
    from .analysis.calibration.scores import PromptSample
    from .analysis.jobs import JobsError, prepare_process, read_arguments
    from .analysis.plotting import PageError, check_outputs
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
        check_outputs(options, "calibration")
        recording = Recording(options.directory)
        card = recording.card  # Read the card first, so that a damaged card fails before the slow work.
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
        return refuse("calibrate", error)
    missing = [p for p in result.proposals if not p.found and p.threshold.outcome != "not needed"]
    return UNREACHED if missing else 0


def _show(
    options: argparse.Namespace, result: CalibrationResult, now: JointShares | None, then: JointShares, faults: str
) -> None:
    """Write a figure, a page, JSON or tables, as requested by the options."""
    from .analysis.calibration import calibration_page
    from .analysis.plotting import save
    from .analysis.table import open_console, print_blocks

    if options.png is not None:
        save(calibration_page.draw_curves(result), options.png)
    if options.html is not None:
        page = calibration_page.build_page(result, now, then, str(options.directory), faults)
        page.write(options.html)
    if options.json:
        document = calibration_page.build_json(result, now, then) | {"mend_first": faults or None}
        print(json.dumps(document, indent=2))  # noqa: T201
        return
    tables = [calibration_page.build_overview_table(result), *calibration_page.build_length_tables(result)]
    tables.append(calibration_page.build_joint_table(now, then))
    console = open_console()
    print_blocks(console, faults, *tables, *calibration_page.format_remarks(result), wrap=True)
    if pasted := calibration_page.list_overrides(result):
        console.print("\nOverrides:", "    " + shlex.join(pasted), sep="\n", markup=False, soft_wrap=True)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=name_program("calibrate"), description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="the recording: the directory named by offpolicy.record.dir")
    add("--spec", nargs="+", default=[], metavar="OVERRIDE", help="Hydra overrides (default: the recorded correction)")
    add("--target-kept", type=float, metavar="P", help="share of units that each mask must keep")
    add("--target-ess", type=float, metavar="P", help="effective sample size of the weight, as a share of tokens")
    add("--confidence", type=float, default=0.95, metavar="P", help="confidence of the intervals, default %(default)s")
    noise = "quantile of the backend noise that delta must exceed"
    add("--floor-quantile", type=float, default=QUANTILE, metavar="P", help=noise)
    add("--png", type=Path, metavar="FILE", help="calibration curves")
    add("--html", type=Path, metavar="FILE", help="one self-contained page")
    add("--json", action="store_true", help="JSON to stdout instead of tables")
    add_jobs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
