"""Attribution, calibration and what-if for a report, over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...correction import CorrectionSpec, SpecError, recommended
from ...recording import Recording, RecordingError
from ..attribution.attribution import Attribution, attribute
from ..attribution.causes.stale_weights import NAME as STALE
from ..calibration.parts import fill_placeholders
from ..calibration.prompt_sample import PromptSample
from ..calibration.propose import CalibrationRequest, CalibrationResult, propose_bounds
from ..jobs import ALONE, Jobs
from ..whatif.candidates import RECORDED, UNCORRECTED, Candidate
from ..whatif.compose import compose_correction, initialize_composer
from ..whatif.study import run_study

if TYPE_CHECKING:
    from ..whatif.outcomes import Study

TARGET_KEPT = 0.98
TARGET_ESS = 0.95
DEFAULT = ("correction=[tis_token,gsm]",)
"""Correction for rows that the current weights sampled: its weight and masks are calibrated if none were active. For
stale rows, the recommended correction takes its place."""
COMPARED = (
    ("correction=tis_token",),
    ("correction=tis_sequence",),
    ("correction=gsm",),
    ("correction=product_mask",),
    ("correction=icepop",),
    ("correction=[tis_token,gsm]",),
    recommended.OVERRIDES,
    ("correction=decoupled_ppo",),
    ("correction=[decoupled_ppo,opsm]", recommended.OVERRIDES[-1]),
)
PROPOSED = "bounds as calibrated above"


@dataclass(frozen=True)
class Studies:
    """Results of the three tools, or the reason why a result is missing.

    Attributes:
        new: calibrated parts that were not active, such as ``masks.gsm``.
        sampled: sentence on the sample on which bounds are based; empty if they are based on all rows.
    """

    new: frozenset[str]
    attribution: Attribution | str
    calibrated: CalibrationResult | str
    study: Study | str
    sampled: str = ""


def run_studies(
    recording: Recording,
    recorded: CorrectionSpec,
    *,
    stale: bool = False,
    spec: Sequence[str] = (),
    jobs: Jobs = ALONE,
    tokenizer: str = "",
) -> Studies:
    """Run all three tools over all steps.

    Args:
        recorded: the correction that acted at the last step.
        stale: whether older weights sampled some rows, according to the recorded versions.
        spec: overrides of the correction that is calibrated. If empty, the recorded correction is calibrated; missing
            parts are taken from ``DEFAULT``, or from the correction that is recommended for stale rows.
        jobs: the processes that read the steps.
        tokenizer: see ``attribute``.

    Raises:
        RecordingError: a step is damaged.
        SpecError: ``spec`` is malformed.
    """
    attributed = _attributed(recording, jobs, tokenizer)
    if isinstance(attributed, Attribution):
        stale = stale or any(cause.name == STALE and cause.verdict == "present" for cause in attributed.causes)
    with initialize_composer():
        compared = [(" ".join(overrides), compose_correction(overrides)) for overrides in COMPARED]
        asked = _asked(recorded, spec, recommended.OVERRIDES if stale else DEFAULT)
    sample = PromptSample.of_recording(recording)
    bounds = asked if isinstance(asked, str) else _calibrated(recording, asked, sample, jobs)
    return Studies(
        new=frozenset() if isinstance(asked, str) else asked.new,
        attribution=attributed,
        calibrated=bounds,
        study=_replayed(recording, recorded, compared, bounds, jobs),
        sampled=sample.sentence,
    )


@dataclass(frozen=True)
class _Asked:
    """The correction to calibrate, its keys without a value, and its parts that were not active in the run."""

    spec: CorrectionSpec
    unset: frozenset[str]
    new: frozenset[str]


def _asked(recorded: CorrectionSpec, spec: Sequence[str], default: Sequence[str]) -> _Asked | str:
    """Build the correction to calibrate; without ``spec``, the recorded correction completed by the default's parts.

    Returns:
        The correction, or a reason if nothing can be calibrated with the recorded pi_old.

    Raises:
        SpecError: ``spec`` is malformed.
    """
    values, unset = fill_placeholders(compose_correction(spec or default))
    if spec:
        correction = CorrectionSpec.from_mapping(values)
        return _Asked(correction, unset, frozenset(_parts(correction)) - _parts(recorded))
    own = recorded.to_mapping()
    filled = own | {"masks": own["masks"] or values["masks"]}
    if not recorded.all_weights:
        filled["weight"] = values["weight"]
    try:
        correction = CorrectionSpec.from_mapping(filled)
    except SpecError as error:
        # If the default's parts are not compatible with the recorded pi_old, only the recorded parts are used.
        return _Asked(recorded, frozenset(), frozenset()) if _parts(recorded) else str(error)
    new = _parts(correction) - _parts(recorded)
    return _Asked(correction, frozenset(key for key in unset if key.rpartition(".")[0] in new), frozenset(new))


def _parts(spec: CorrectionSpec) -> set[str]:
    return {f"masks.{name}" for name, _ in spec.masks} | set(spec.all_weights)


def _beside(values: dict[str, Any], recorded: CorrectionSpec) -> dict[str, Any]:
    """Set the source of pi_old in a correction's plain values to the recorded one."""
    return values | {"proximal": recorded.proximal, "alpha": recorded.alpha}


def _attributed(recording: Recording, jobs: Jobs, tokenizer: str) -> Attribution | str:
    try:
        return attribute(recording, jobs=jobs, tokenizer=tokenizer)
    except RecordingError as error:
        return str(error)


def _calibrated(recording: Recording, asked: _Asked, sample: PromptSample, jobs: Jobs) -> CalibrationResult | str:
    request = CalibrationRequest(target_kept=TARGET_KEPT, target_ess=TARGET_ESS, settle=True)
    try:
        return propose_bounds(recording, asked.spec, request, asked.unset, sample=sample, jobs=jobs)
    except (RecordingError, SpecError) as error:
        return str(error)


def _replayed(
    recording: Recording,
    recorded: CorrectionSpec,
    compared: Sequence[tuple[str, dict[str, Any]]],
    bounds: CalibrationResult | str,
    jobs: Jobs,
) -> Study | str:
    chosen = [Candidate(UNCORRECTED, UNCORRECTED)]
    if not recorded.is_none:
        chosen.append(Candidate(RECORDED, RECORDED))
    if isinstance(bounds, CalibrationResult) and any(proposal.found for proposal in bounds.proposals):
        chosen.append(Candidate(PROPOSED, PROPOSED, spec=bounds.spec))
    for override, values in compared:
        try:
            chosen.append(Candidate(override, override, spec=CorrectionSpec.from_mapping(_beside(values, recorded))))
        except SpecError as error:
            chosen.append(Candidate(override, override, error=str(error)))
    try:
        return run_study(recording, recording.steps, chosen, jobs=jobs)
    except SpecError as error:
        return str(error)
