"""Propose bounds from a recording, for a target kept share or a target effective sample size.

python -m recipe.offpolicy.calibrate DIR --spec 'correction=[tis_token,gsm]' --target-kept 0.98 --target-ess 0.9

Exit status: 0; 1 if a bound was not found; 2 if the recording or an argument is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .analysis.calibration import QUANTILE
from .command_line import Output, add_outputs, add_recording, name_program, run, run_tool

if TYPE_CHECKING:
    from .correction import CorrectionSpec
    from .recording import Recording

UNREACHED = 1
"""Exit status if no bound was found for a part."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    modules = ("numpy", "torch", "pyarrow", "polars", "xxhash", "hydra")
    return run_tool("calibrate", build_parser().parse_args(arguments), modules, _calibrate)


def _calibrate(options: argparse.Namespace) -> Output:
    from .analysis.attribution.attribution import describe_recorded_faults
    from .analysis.calibration import calibration_page
    from .analysis.calibration.propose import CalibrationRequest, propose_bounds
    from .analysis.calibration.scores import PromptSample
    from .analysis.jobs import read_arguments
    from .recording import Recording

    names = ("target_kept", "target_ess", "confidence", "floor_quantile")
    request = CalibrationRequest(**{name: getattr(options, name) for name in names})
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
    *known, then = calibration_page.compute_joint_shares(recording, [*([] if unset else [spec]), result.spec], jobs)
    shares = (known[0] if known else None, then)
    missing = [p for p in result.proposals if not p.found and p.threshold.outcome != "not needed"]
    return Output(
        title="Calibration",
        subtitle=str(options.directory),
        sections=lambda: {"Fix first": [faults], "Proposed": calibration_page.build_blocks(result, *shares)},
        document=lambda: calibration_page.build_document(result, *shares) | {"mend_first": faults or None},
        status=UNREACHED if missing else 0,
    )


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


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=name_program("calibrate"), description=__doc__.split("\n")[0])
    add_recording(parser)
    add = parser.add_argument
    add("--spec", nargs="+", default=[], metavar="OVERRIDE", help="Hydra overrides (default: the recorded correction)")
    add("--target-kept", type=float, metavar="P", help="share of units that each mask must keep")
    add("--target-ess", type=float, metavar="P", help="effective sample size of the weight, as a share of tokens")
    add("--confidence", type=float, default=0.95, metavar="P", help="confidence of the intervals, default %(default)s")
    noise = "quantile of the backend noise that delta must exceed"
    add("--floor-quantile", type=float, default=QUANTILE, metavar="P", help=noise)
    add_outputs(parser, html=True)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
