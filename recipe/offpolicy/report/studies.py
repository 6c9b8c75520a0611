"""What a report takes from the other tools: attribution, calibration and what-if, over the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..attribution.attribution import Attribution, explain
from ..calibration.parts import placeholders
from ..calibration.propose import Calibrated, Request, calibrated
from ..correction import CorrectionSpec, SpecError
from ..recording import Recording, RecordingError, Step, concatenated
from ..whatif.candidates import RECORDED, UNCORRECTED, Candidate
from ..whatif.composed import composed_mapping, composer
from ..whatif.study import Study, study
from .sample import Sample

TARGET_KEPT = 0.98
TARGET_ESS = 0.95
DEFAULT = "correction=[tis_token,gsm,opsm]"
"""What is calibrated where nothing was on."""
COMPARED = (
    "correction=tis_token",
    "correction=tis_sequence",
    "correction=gsm",
    "correction=product_mask",
    "correction=icepop",
    "correction=[tis_token,gsm]",
)
PROPOSED = "with the proposed bounds"


@dataclass(frozen=True)
class Studies:
    """Results, or the reason why there is none.

    Attributes:
        asked: overrides of the correction that was calibrated; empty for what was recorded.
    """

    asked: tuple[str, ...]
    attribution: Attribution | str
    calibrated: Calibrated | str
    study: Study | str


def studies_of(recording: Recording, sample: Sample, recorded: CorrectionSpec, *, spec: Sequence[str] = ()) -> Studies:
    """Run all three over the sample's steps.

    Args:
        recorded: what acted at the last step.
        spec: overrides of the correction that is calibrated; empty: what was recorded, or ``DEFAULT``.

    Raises:
        RecordingError: a step is damaged.
        SpecError: ``spec`` is malformed.
    """
    nothing = recorded.weight is None and not recorded.masks
    overrides = tuple(spec) or ((DEFAULT,) if nothing else ())
    with composer():
        values, unset = placeholders(composed_mapping(overrides)) if overrides else (recorded.to_mapping(), frozenset())
        compared = [(override, composed_mapping([override])) for override in COMPARED]
    # What was asked for says where its pi_old comes from; a default takes what was recorded.
    asked = CorrectionSpec.from_mapping(values if spec else _beside(values, recorded))
    bounds = _calibrated(recording, sample, asked, unset)
    return Studies(
        asked=overrides,
        attribution=_attributed(recording, sample),
        calibrated=bounds,
        study=_replayed(recording, sample, recorded, compared, bounds),
    )


def _beside(values: dict[str, Any], recorded: CorrectionSpec) -> dict[str, Any]:
    """A correction's plain values with the pi_old that was recorded."""
    return values | {"proximal": recorded.proximal, "alpha": recorded.alpha}


def _attributed(recording: Recording, sample: Sample) -> Attribution | str:
    rows = concatenated([recording.step(step).rows for step in sample.studied])
    try:
        return explain(rows, recording.card)
    except RecordingError as error:
        return str(error)


def _calibrated(recording: Recording, sample: Sample, asked: CorrectionSpec, unset: frozenset[str]) -> Calibrated | str:
    request = Request(target_kept=TARGET_KEPT, target_ess=TARGET_ESS)
    try:
        return calibrated(_steps(recording, sample), asked, request, unset)
    except SpecError as error:
        return str(error)


def _replayed(
    recording: Recording,
    sample: Sample,
    recorded: CorrectionSpec,
    compared: Sequence[tuple[str, dict[str, Any]]],
    bounds: Calibrated | str,
) -> Study | str:
    chosen = [Candidate(UNCORRECTED, UNCORRECTED)]
    if not recorded.is_none:
        chosen.append(Candidate(RECORDED, RECORDED))
    if isinstance(bounds, Calibrated) and any(proposal.found for proposal in bounds.proposals):
        chosen.append(Candidate(PROPOSED, PROPOSED, spec=bounds.spec))
    for override, values in compared:
        try:
            chosen.append(Candidate(override, override, spec=CorrectionSpec.from_mapping(_beside(values, recorded))))
        except SpecError as error:
            chosen.append(Candidate(override, override, error=str(error)))
    try:
        return study(recording, sample.studied, chosen)
    except SpecError as error:
        return str(error)


def _steps(recording: Recording, sample: Sample) -> Iterator[Step]:
    return (recording.step(step) for step in sample.studied)
