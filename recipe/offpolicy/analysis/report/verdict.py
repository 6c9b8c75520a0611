"""Verdict of a report: questions, answers and evidence, from attribution, calibration and what-if over all steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...correction import CorrectionSpec, SpecError, recommended
from ...correction.spec import format_bounds
from ...recording import Recording, RecordingError
from ..attribution.attribution import Attribution, attribute
from ..attribution.attribution_page import describe_unexplained, format_shares, is_healthy
from ..attribution.cause import STALE
from ..attribution.recorded_tokens import describe_left_out, describe_none_scored
from ..attribution.worst_examples import escape
from ..calibration import QUANTILE
from ..calibration.calibration_page import format_bucket
from ..calibration.parts import fill_placeholders
from ..calibration.propose import CalibrationRequest, CalibrationResult, Proposal, propose_bounds
from ..calibration.scores import PromptSample
from ..jobs import ALONE, Jobs
from ..table import Column, Table
from ..whatif.candidates import RECORDED, UNCORRECTED, Candidate, compose_correction, initialize_composer
from ..whatif.study import run_study
from .timeline import Floats, Timeline

if TYPE_CHECKING:
    from ..whatif.study import Study

T = TypeVar("T")

TARGET_KEPT = 0.98
TARGET_ESS = 0.95
DEFAULT = ("correction=[tis_token,gsm]",)
"""The correction to calibrate for rows sampled with the current weights; its weight and masks are added if the run had
none. For stale rows, the recommended correction is used instead."""
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
COPIED = "mu equals pi_old bit for bit, so one may be a copy of the other"
_LEAST_STEPS = 3
"""Minimum number of steps for comparing the beginning of the run with its end."""
_GREW = 2.0
_SWINGS = 10.0
_NEXT = {
    "not reachable": "Next: remove the cause of the mismatch, because no bound removes it",
    "not identified": "Next: record more steps (offpolicy.record.every=1, offpolicy.record.share=1)",
}


@dataclass(frozen=True)
class Studies:
    """Results of the three tools, or the reason why a result is missing.

    Attributes:
        new: calibrated parts that were not active, such as ``masks.gsm``.
        sampled: sentence about the sample from which bounds are computed; empty if all rows are used.
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
        recorded: the correction that was active at the last step.
        stale: whether some rows were sampled with older weights, according to the recorded versions.
        spec: overrides of the correction that is calibrated. If empty, the recorded correction is calibrated; missing
            parts are taken from ``DEFAULT``, or from the correction that is recommended for stale rows.
        jobs: the processes that read the steps.
        tokenizer: see ``attribute``.

    Raises:
        SpecError: ``spec`` is malformed.
    """
    attributed = _attempt(partial(attribute, recording, jobs=jobs, tokenizer=tokenizer))
    if isinstance(attributed, Attribution):
        stale = stale or any(cause.name == STALE and cause.verdict == "present" for cause in attributed.causes)
    sample = PromptSample.of_recording(recording)
    request = CalibrationRequest(target_kept=TARGET_KEPT, target_ess=TARGET_ESS, settle=True)
    with initialize_composer():
        compared = {" ".join(overrides): compose_correction(overrides) for overrides in COMPARED}
        values, unset = fill_placeholders(compose_correction(spec or (recommended.OVERRIDES if stale else DEFAULT)))
    chosen = CorrectionSpec.from_mapping(values) if spec else _attempt(partial(_add_missing, recorded, values))
    if isinstance(chosen, str):
        new = frozenset[str]()
        bounds: CalibrationResult | str = chosen
    else:
        new = frozenset(_list_parts(chosen) - _list_parts(recorded))
        unset = frozenset(key for key in unset if spec or key.rpartition(".")[0] in new)
        bounds = _attempt(partial(propose_bounds, recording, chosen, request, unset, sample=sample, jobs=jobs))
    candidates = _list_candidates(recorded, compared, bounds)
    study = _attempt(partial(run_study, recording, recording.steps, candidates, jobs=jobs))
    return Studies(new, attributed, bounds, study, sample.sentence)


def _attempt(work: Callable[[], T]) -> T | str:
    """Return the result of a tool, or the reason why there is none."""
    try:
        return work()
    except (RecordingError, SpecError) as error:
        return str(error)


def _add_missing(recorded: CorrectionSpec, default: Mapping[str, Any]) -> CorrectionSpec:
    """Add the weight or the masks of ``default`` to the recorded correction if it has none.

    Raises:
        SpecError: the correction was none, and the default is not compatible with the recorded pi_old.
    """
    own = recorded.to_mapping()
    filled = own | {"masks": own["masks"] or default["masks"]}
    if not recorded.all_weights:
        filled["weight"] = default["weight"]
    try:
        return CorrectionSpec.from_mapping(filled)
    except SpecError:
        if not _list_parts(recorded):
            raise
        return recorded


def _list_parts(spec: CorrectionSpec) -> set[str]:
    return {f"masks.{name}" for name, _ in spec.masks} | set(spec.all_weights)


def _list_candidates(
    recorded: CorrectionSpec, compared: Mapping[str, dict[str, Any]], bounds: CalibrationResult | str
) -> list[Candidate]:
    chosen = [Candidate(UNCORRECTED, UNCORRECTED)]
    if not recorded.is_none:
        chosen.append(Candidate(RECORDED, RECORDED))
    if isinstance(bounds, CalibrationResult) and any(proposal.found for proposal in bounds.proposals):
        chosen.append(Candidate(PROPOSED, PROPOSED, spec=bounds.spec))
    for name, values in compared.items():
        # The source of pi_old is that of the recording.
        values |= {"proximal": recorded.proximal, "alpha": recorded.alpha}
        try:
            chosen.append(Candidate(name, name, spec=CorrectionSpec.from_mapping(values)))
        except SpecError as error:
            chosen.append(Candidate(name, name, error=str(error)))
    return chosen


@dataclass(frozen=True)
class Answer:
    """One line of the verdict."""

    question: str
    answer: str
    because: str


def build_answers(
    timeline: Timeline, spec: CorrectionSpec, proof: Mapping[str, Any], studies: Studies | None
) -> tuple[Answer, ...]:
    """Build the lines of the verdict.

    Args:
        spec: the correction that was active at the last step.
        proof: the liveness proof, as recorded; empty if there is none.
        studies: results of the tools; if None, the lines that need these results are omitted.
    """
    return (
        answer_liveness(spec, proof),
        Answer("Do the engines agree?", *_mismatch(timeline)),
        *([Answer("Where does the mismatch come from?", *_origin(studies.attribution, timeline))] if studies else ()),
        Answer("What does the correction keep?", *_kept(timeline, spec)),
        *(_fit(studies) if studies else ()),
        Answer("Does the reward rise?", *_reward(timeline)),
    )


def build_table(lines: tuple[Answer, ...]) -> Table:
    """Build the table of the verdict."""
    rows = [(line.question, line.answer, line.because) for line in lines]
    return Table((Column("question"), Column("answer"), Column("because")), rows)


def answer_liveness(spec: CorrectionSpec, proof: Mapping[str, Any]) -> Answer:
    """Report whether the correction reached the gradient, according to the recorded liveness proof."""
    question = "Is the correction live?"
    sentence, numbers = escape(str(proof.get("sentence", ""))), proof.get("live")
    if sentence and isinstance(numbers, Mapping) and numbers.get("proved") == 1.0:
        return Answer(question, "yes", f"Proved at step {escape(str(proof.get('step', '?')))}: {sentence}")
    if sentence:
        return Answer(question, "not proved", sentence)
    if spec.is_none:
        return Answer(question, "no correction is on", "The recorded correction has no weight and no mask.")
    return Answer(
        question,
        "not shown",
        "No liveness proof was recorded: the run ended before its first update was checked, or proof.json is missing.",
    )


def _mismatch(timeline: Timeline) -> tuple[str, str]:
    kl, tokens = timeline.get_column("kl"), timeline.get_column("compared")
    unscored = sum(step.unscored for step in timeline.steps)
    if not np.isfinite(kl).any():
        none_scored = unscored == timeline.rows
        return (
            "unknown",
            f"{describe_none_scored(unscored)}." if none_scored else "No token has a finite mu and pi_old.",
        )
    mean = _average(kl, tokens)
    lost = sum(step.nonfinite for step in timeline.steps)
    end = f" {lost:,} tokens have a log-prob that is not finite." if lost else ""
    if unscored:
        end += (
            f" {unscored:,} rows of later gradient steps are excluded, because the trainer's pi_old was not recorded."
        )
    if _is_copied(timeline):
        same = (
            f"mu equals pi_old at all {int(tokens.sum()):,} tokens, which does not happen with two different engines."
        )
        return COPIED, f"{same} Check where rollout_log_probs and old_log_probs come from.{end}"
    fresh, counts = timeline.get_column("kl_fresh"), timeline.get_column("fresh_tokens")
    if not counts.sum():
        because = "Every row was sampled by older weights, so mismatch and staleness cannot be told apart. Together, "
        return "unknown", f"{because}they amount to {mean:.2g} nats per token; {describe_trend(kl, 'nats')}.{end}"
    answer = f"KL(mu, pi_old) {_average(fresh, counts):.2g} nats per token"
    if not timeline.is_stale:
        return answer, f"Mean over {int(tokens.sum()):,} response tokens; {describe_trend(kl, 'nats')}.{end}"
    because = f"Mean over {int(counts.sum()):,} tokens sampled with fresh weights; {describe_trend(fresh, 'nats')}. "
    return answer, f"{because}With stale rows, which were sampled with older weights, the mean is {mean:.2g}.{end}"


def _average(values: Floats, counts: Floats) -> float:
    """Compute the mean per unit over the steps whose value is known."""
    known = np.isfinite(values) & (counts > 0)
    return float(np.average(values[known], weights=counts[known]))


def _is_copied(timeline: Timeline) -> bool:
    """Check whether mu equals pi_old bit for bit at every step that has a valid token."""
    known = [step.copied for step in timeline.steps if math.isfinite(step.kl)]
    return bool(known) and all(known)


def _origin(attribution: Attribution | str, timeline: Timeline) -> tuple[str, str]:
    if _is_copied(timeline):
        return COPIED, "Without the engine's own mu, nothing can be attributed."
    if isinstance(attribution, str):
        return "unknown", attribution
    present = [cause for cause in attribution.causes if cause.verdict == "present"]
    note = f" {describe_left_out(attribution.left_out)}" if attribution.left_out else ""
    shares = f"{_capitalize(format_shares(attribution.whole))}.{note}"
    if not present:
        answer = "no fault found" if is_healthy(attribution) else "unknown"
        return answer, f"{describe_unexplained(attribution)} {shares}"
    found = ". ".join(
        (f"{cause.name}: " if len(present) > 1 else "")
        + _capitalize(cause.sentence)
        + (f" ({cause.fix})" if cause.fix else "")
        for cause in present
    )
    return ", ".join(cause.name for cause in present), f"{found}. {shares}"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _kept(timeline: Timeline, spec: CorrectionSpec) -> tuple[str, str]:
    kept = timeline.get_column("kept_tokens")
    if not np.isfinite(kept).any() or not timeline.lengths:
        return "unknown", "No response token with a finite mu and pi_old was recorded."
    share = _average(kept, timeline.get_column("tokens"))
    if not spec.masks and not spec.weight_rejects and share == 1.0:
        return "everything", "The correction rejects nothing."
    worst = min(timeline.lengths, key=lambda entry: entry.kept_rows)
    by = ", ".join(f"{reason} {rejected:.1%}" for reason, rejected in timeline.reasons.items() if rejected > 0)
    because = f"Rejected by {by}. " if by else ""
    because += (
        f"Of all length buckets, T {format_bucket(worst.bucket)} has the smallest kept share: {worst.kept_rows:.1%} "
        f"of its {worst.rows} rows."
    )
    return f"{share:.1%} of tokens", because


def _fit(studies: Studies) -> list[Answer]:
    """Build an answer for each bound, preceded by the faults that must be fixed first."""
    faults = "" if isinstance(studies.attribution, str) else studies.attribution.mend_first
    first = [Answer("Can a bound be set?", "fix the cause first", faults)] if faults else []
    if isinstance(studies.calibrated, str):
        return [*first, Answer("Do the bounds fit?", "unknown", studies.calibrated)]
    return [*first, *(_proposal(proposal, studies) for proposal in studies.calibrated.proposals)]


def _proposal(proposal: Proposal, studies: Studies) -> Answer:
    name, threshold, present = proposal.part.key, proposal.threshold, proposal.part.now
    new = name in studies.new
    question = f"Which bound for {name}?" if new else f"Does the bound of {name} fit?"

    def reaches(values: Mapping[str, float | None], share: float) -> str:
        if proposal.target == "ess":
            return f"{format_bounds(values)} has an ESS of {share:.4f}"
        return f"{format_bounds(values)} keeps {share:.1%} of {proposal.part.looks_at}"

    if new and present == {"delta": recommended.DELTA}:
        why = f"Recommended for stale data: {recommended.WHY}. Here {reaches(present, proposal.now)}."
        return Answer(question, f"delta={recommended.DELTA:g}", why)
    sentences = []
    if not math.isnan(proposal.now):
        sentences.append(f"{'By default' if new else 'Now'} {reaches(present, proposal.now)}")
    if proposal.found:
        answer = format_bounds(threshold.values)
        sentences.append(f"Proposed: {reaches(threshold.values, threshold.reached)}; {proposal.goal:g} was requested")
        if proposal.floor is not None and proposal.floor.share < QUANTILE:
            sentences.append(
                f"{proposal.floor.rows} rows determine only the {proposal.floor.share:g}-quantile of the engines' own "
                f"noise: record more steps to bound its {QUANTILE:g}-quantile"
            )
    elif threshold.outcome == "not needed":
        answer = "no cap needed"
    else:
        answer = f"none found; {'the default' if new else 'the current bound'}: {format_bounds(present)}"
    if threshold.note:
        note = threshold.note if threshold.missing is None else threshold.missing.reason
        sentences.append(_capitalize(note.removeprefix("not identified: ").rstrip(".")))
        if threshold.outcome in _NEXT and "Record" not in note and "Look for" not in note:
            sentences.append(_NEXT[threshold.outcome])
    if proposal.lengths:
        sentences.append("The bound treats short and long rows differently (see below)")
    return Answer(question, answer, ". ".join(sentences) + ".")


def _reward(timeline: Timeline) -> tuple[str, str]:
    reward = timeline.get_column("reward")
    if not np.isfinite(reward).any():
        return "unknown", "No reward was recorded."
    thirds = _thirds(reward)
    if thirds is None:
        return "too few steps", f"Mean reward {float(np.nanmean(reward)):.3f}."
    (first, first_error), (last, last_error) = thirds
    # Standard error of the difference of two independent means.
    error = math.hypot(first_error, last_error)
    gain = last - first
    word = "yes" if gain > 2 * error else "it falls" if gain < -2 * error else "not clearly"
    because = f"The mean is {first:.3f} in the first third of the steps and {last:.3f} in the last"
    return word, f"{because}; the standard error of the difference is {error:.3f}."


def describe_trend(values: Floats, unit: str) -> str:
    """Describe how a number changed over the steps."""
    thirds = _thirds(values)
    if thirds is None:
        return "too few steps for a trend"
    (first, _), (last, _) = thirds
    least, most = float(np.nanmin(values)), float(np.nanmax(values))
    # Swings are checked before the trend, because a single spike in one third would otherwise count as growth.
    if _GREW * max(first, last) < most and _SWINGS * least < most:
        return f"it varies between {least:.2g} and {most:.2g} {unit} from step to step"
    if first > 0 and (last > _GREW * first or first > _GREW * last):
        return f"{'grew' if last > first else 'fell'} from {first:.2g} to {last:.2g} {unit} (first and last third)"
    return f"steady over the run ({first:.2g} and {last:.2g} {unit} in the first and last third)"


def _thirds(values: Floats) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Compute mean and standard error of the first and the last third of the steps; None for too few steps."""
    known = values[np.isfinite(values)]
    if len(known) < _LEAST_STEPS:
        return None
    third = max(len(known) // 3, 1)

    def of(part: Floats) -> tuple[float, float]:
        # A third that consists of one step has no standard deviation, so the standard deviation over all steps is used.
        spread = float(part.std(ddof=1)) if len(part) > 1 else float(known.std(ddof=1))
        return float(part.mean()), spread / math.sqrt(len(part))

    return of(known[:third]), of(known[-third:])
