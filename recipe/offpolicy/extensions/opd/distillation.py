"""On-policy distillation as an extension, which uses a teacher's log-probs to train on failed rollouts of hard prompts.

Requests to the teacher are sent as soon as a batch's rewards are known, and run while the workers compute pi_old.
Advantages are computed once the answers have arrived. ``opd=advantage`` replaces the advantages of eligible tokens with
K1; ``opd=loss`` adds K2 to the loss.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ...batch.declared_keys import Configured
from ...correction import Problem
from ...proof.rewards import check_rewards, mean
from ...proof.rollout_log_probs import LEAST_TOKENS, UNSURE, Column, check_arrived, check_zeros
from ...proof.token_alignment import AlignmentChecker, tally_agreements
from ...proof.verify import LivenessError
from ..add_on import Extension
from ..advantage_proof import name_hashes
from ..batch_view import BatchView, last_outputs, read_plain
from . import signal
from .settings import OpdSettings
from .signal import (
    CENTRE,
    FACTOR,
    ROW,
    TEACHER,
    OpdReport,
    OpdWorker,
    check_reports,
    summarize_reports,
)
from .start_up import find_model, find_problems
from .teacher_client import Row, Scoring, TeacherClient

logger = logging.getLogger("verl.offpolicy")

DOMINATES, UPDATES = 0.9, 3
"""The run warns that the teacher dominates the rewards if its share of the loss's gradient exceeds ``DOMINATES`` in
``UPDATES`` consecutive updates."""
IDLE = 20
"""Number of consecutive updates without an eligible row before the warning."""
PROBES = 2
"""Number of rows per batch that are scored again."""
SILENT = 1e-3
"""Largest gap, in nats, that two engines with the same weights may show."""


COLUMN = Column("the teacher's log-probs", "Check the log of the server in opd.teacher.url.", LivenessError)
ROUNDING = 2.0**-22
"""Relative difference up to which two float32 log-probs count as equal."""
APART, APART_ALONE, MOST_APART = 0.1, 0.3, 5.0
"""Limits in nats: ``APART`` bounds the mean difference between two scorings of a long row, ``APART_ALONE`` is added for
a row of one token, and ``MOST_APART`` caps the difference of one token."""


def check_teacher(student: Tensor, teacher: Tensor, scored: Tensor) -> None:
    """Check that the teacher's scores look like log-probs, and like those of a policy other than the student.

    Args:
        student: (B, T) log pi_old.
        teacher: (B, T), -inf where the teacher excludes a token.
        scored: (B, T) bool.

    Raises:
        LivenessError: values are zeros, all equal, mostly not finite, above 0, or equal to the student's within float32
            rounding.
    """
    check_arrived(teacher, scored, COLUMN)
    check_zeros(teacher, student, scored, COLUMN)
    unsure = scored & (student < -UNSURE)
    apart = (student - teacher).abs() > ROUNDING * student.abs().clamp(min=1.0)
    if int(unsure.sum()) >= LEAST_TOKENS and not (apart & unsure).any():
        raise LivenessError(
            f"opd: the teacher's log-probs of {int(scored.sum())} tokens equal log pi_old, so the teacher is the "
            "student itself and teaches nothing. Fix: set opd.teacher.url to the teacher's server."
        )


def _compute_unrelated_limit(rows: int) -> float:
    """Compute the concordance below which scores of this many rows carry no information about their tokens.

    By chance, the expected concordance is 0, with a standard deviation of about 0.7 / sqrt(rows). A useful teacher may
    disagree about most tokens of failed rows: one that improved its student had a concordance of 0.17 on such rows.
    """
    return 0.12 - 2.8 / math.sqrt(rows)


def build_alignment(*, allow_unrelated: bool) -> AlignmentChecker:
    """Build the checker that compares the teacher's log-probs with the student's."""
    lost = "the teacher teaches nothing about these tokens; compare its vocabulary and chat template with the student's"
    names = "the teacher's log-probs", "the teacher", lost
    return AlignmentChecker(allow_unrelated, _compute_unrelated_limit, 1024, *names)


def check_repeated(first: Sequence[float], again: Sequence[float], what: str) -> None:
    """Check that the teacher scores a row again as it did before.

    Raises:
        LivenessError: the scores differ by more than the precision of 16-bit servers explains.
    """
    pairs = zip_longest(first, again, fillvalue=math.inf)
    apart = [min(abs(one - other), MOST_APART) if one != other else 0.0 for one, other in pairs]
    mean, allowed = math.fsum(apart) / len(apart), APART + APART_ALONE / math.sqrt(len(apart))
    if not mean <= allowed:
        reason = "The teacher's weights have changed, it mixes up the rows of a request, or its servers differ."
        differ = f"its {len(apart)} log-probs differ by {mean:.2g} nats on average (allowed: {allowed:.2g})"
        raise LivenessError(f"opd: {what}: {differ}. {reason}")


@dataclass
class Teacher:
    """One teacher of a run.

    Attributes:
        every: number of steps after which rows are scored again; None: never.
        scoring: the pending log-probs of the batch.
        first: the first row that was scored again, with its log-probs.
        probed: the step at which rows were last scored again.
        again: repeated scorings: (scoring, expected log-probs, description); None expects those of ``scoring``.
    """

    client: TeacherClient
    alignment: AlignmentChecker
    every: int | None
    scoring: Scoring
    first: tuple[Row, list[float]] | None = None
    probed: int | None = None
    again: list[tuple[Scoring, list[float] | None, str]] = field(default_factory=list)

    def start(self, rows: Sequence[Row], step: int) -> None:
        """Request log-probs of the batch, and repeat the requests for two of its rows alone and for an earlier row."""
        self.scoring, self.again = self.client.start(rows), []
        due = self.probed is None or (self.every is not None and step >= self.probed + self.every)
        if self.every is None or not rows or not due:
            return
        self.probed = step
        for row in random.Random(step).sample(list(rows), min(PROBES, len(rows))):
            self.again.append((self.client.start([row]), None, f"sequence {row.number} was scored again, alone"))
        if self.first is not None:
            row, answer = self.first
            self.again.append((self.client.start([row]), answer, "a sequence of an earlier step was scored again"))

    def wait(self) -> dict[int, list[float]]:
        """Wait for the log-probs, compare them with repeated scorings, and return them by row number."""
        found = self.client.wait(self.scoring)
        answers = {row.number: values for row, values in zip(self.scoring.rows, found, strict=True)}
        for scoring, expected, what in self.again:
            ((row,), (again,)) = scoring.rows, self.client.wait(scoring)
            check_repeated(answers[row.number] if expected is None else expected, again, what)
            self.first = self.first or (row, again)
        return answers


class OnPolicyDistillation(Extension):
    """Extension for on-policy distillation; ``settings.OpdSettings`` describes its section."""

    phase = "teacher"

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.opd = OpdSettings.from_mapping(section, settings)
        self._teachers: dict[str, Teacher] = {}
        self._of: list[str | None] = []
        self._source_key = "data_source"
        self._factor, self._epochs = 1.0, 1
        self._eligible = torch.zeros(0, dtype=torch.bool)
        self._near = torch.zeros(0, 0, dtype=torch.bool)
        self._sent: dict[str, int] = {}
        self._found: dict[str, float] = {}
        self._proved = self._asked = False
        self._largest_gap = 0.0
        self._dominated = self._idle = 0

    # Before Ray starts --------------------------------------------------------------------------------------

    @property
    def meaning(self) -> str:
        opd, gate = self.opd, self.opd.eligible
        horizon = "" if opd.horizon is None else f", first {opd.horizon} tokens"
        schedule = f" by {opd.schedule.by}" if opd.schedule.by else ""
        return (
            f"{opd.mode}, coef={opd.coef:g}{schedule}, {gate.rows} rollouts of prompts with a pass rate of at most "
            f"{gate.max_pass_rate:g}{horizon}, teacher {opd.shown}"
        )

    @property
    def replay_note(self) -> str:
        if self.opd.mode == "loss":
            term = f"its loss term, {self.opd.coef:g} K2 of eligible tokens"
            return f"{term}, is not replayed: the figures show only the policy term."
        return (
            "advantages of eligible tokens were computed from the teacher and the run's log pi_old, and are replayed "
            "unchanged: training with another correction.proximal would have produced other advantages."
        )

    @property
    def reads_old_log_prob(self) -> bool:
        return True

    @property
    def noted(self) -> Mapping[str, Any]:
        """All settings except those needed to connect to the teacher."""
        return {name: value for name, value in self.settings.items() if name != "teacher"}

    @property
    def needs_rollouter(self) -> Mapping[str, str]:
        if not self.opd.teachers.keys() - {""}:
            return {}
        at = f"{self.section}.teacher"
        return {f"{at}.sources": f"Set {at}.url to a single teacher, and set {at}.sources=null."}

    def problems(self, config: DictConfig) -> Iterable[Problem]:
        return find_problems(self.section, self.opd, Configured(config, self.section))

    # In the trainer -----------------------------------------------------------------------------------------

    def begin(self, config: DictConfig) -> None:
        read = partial(OmegaConf.select, OmegaConf.create({}) if config is None else config)
        self._source_key = str(read("data.reward_fn_key") or "data_source")
        self._epochs = int(read("actor_rollout_ref.actor.ppo_epochs") or 1)
        unrelated = bool(read("offpolicy.allow_unrelated_log_probs"))
        for source, settings in self.opd.teachers.items():
            client = TeacherClient(settings, *find_model(settings))
            alignment = build_alignment(allow_unrelated=unrelated)
            self._teachers[source] = Teacher(client, alignment, settings.probe_every, client.start([]))

    def end(self) -> None:
        for teacher in self._teachers.values():
            teacher.client.close()

    def on_rollout(self, batch: BatchView) -> None:
        mask = batch.rows("response_mask")["response_mask"].bool()
        self._of = self._choose_teachers(batch)
        self._eligible = self._find_eligible(batch, mask)
        if self.opd.schedule.by in ("step", "pass_rate"):
            self._follow(batch.step if self.opd.schedule.by == "step" else self._found["opd/pass_rate"])
        self._near = signal.find_horizon(mask & self._eligible[:, None], self.opd.horizon)
        rows: dict[str, list[Row]] = {source: [] for source in self._teachers}
        for number, (prompt, response) in enumerate(batch.token_ids):
            if self._near[number].any():
                last = int(self._near[number].nonzero()[-1]) + 1
                rows[str(self._of[number])].append(Row(number, tuple(prompt), tuple(response[:last])))
        for source, teacher in self._teachers.items():
            teacher.start(rows[source], batch.step)

    def _choose_teachers(self, batch: BatchView) -> list[str | None]:
        """Choose each row's teacher by data source; None if the source has no teacher."""
        default = "" if "" in self._teachers else None
        if not self._teachers.keys() - {""}:
            return [default] * len(batch.uids)
        sources = map(str, read_plain(batch, self._source_key))
        return [source if source in self._teachers else default for source in sources]

    def _follow(self, value: float) -> None:
        """Set the schedule's factor. If it is 0, no row is eligible."""
        plan = self.opd.schedule
        if not math.isnan(value) and plan.start is not None and plan.end is not None:
            self._factor = signal.compute_factor(value, start=plan.start, end=plan.end, final=plan.final)
        if self._factor == 0:
            self._eligible = torch.zeros_like(self._eligible)
            self._found["opd/frac_opd_samples"] = 0.0

    def _find_eligible(self, batch: BatchView, mask: Tensor) -> Tensor:
        """Find the rows of eligible sessions that have a token, (n,) bool, and record their share."""
        gate = self.opd.eligible
        check_rewards(batch.scores, batch.uids, f"step {batch.step}")
        sessions, uids = list(batch.sessions), list(batch.uids)
        counted = [row for row in last_outputs(batch) if mask[row].any()]
        rewards, groups = (batch.scores.double() * mask).sum(-1)[counted], [uids[row] for row in counted]
        chosen = signal.eligible(
            rewards, groups, passed_above=gate.passed_above, max_pass_rate=gate.max_pass_rate, rows=gate.rows
        )
        rates = signal.compute_pass_rates(rewards, groups, passed_above=gate.passed_above)
        hard = {uid for uid, rate in zip(groups, rates.tolist(), strict=True) if rate <= gate.max_pass_rate}
        self._found = {
            "opd/frac_opd_samples": mean(chosen),
            "opd/frac_underperforming_prompts": len(hard) / len(set(groups)) if groups else math.nan,
            "opd/pass_rate": mean(signal.find_passed(rewards, gate.passed_above)),
        }
        of = {sessions[row] for row, is_chosen in zip(counted, chosen.tolist(), strict=True) if is_chosen}
        taught = [session in of and source is not None for session, source in zip(sessions, self._of, strict=True)]
        return torch.tensor(taught) & mask.any(-1)

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        before = time.monotonic()
        answers = {row: values for teacher in self._teachers.values() for row, values in teacher.wait().items()}
        waited = time.monotonic() - before
        columns = batch.rows("responses", "old_log_probs", "response_mask")
        student, near, opd = columns["old_log_probs"].float(), self._near, self.opd
        teacher = torch.full(near.shape, math.nan, dtype=torch.float32)
        for row, values in answers.items():
            teacher[row, : len(values)] = torch.tensor(values)
        teacher[~near] = math.nan
        for source in self._teachers:
            check_teacher(student, teacher, self._near_of(source))
        excluded = near & torch.isneginf(teacher)
        # Send a finite log-prob for excluded tokens: the one whose gap equals the bound.
        teacher = torch.where(excluded, student - opd.max_gap, teacher)
        gaps = signal.compute_gaps(student, teacher, near, max_gap=opd.max_gap)
        scale, centre = 1.0, 0.0
        if opd.mode == "advantage":
            scale, centre = (find(gaps, near, opd.scale) for find in (signal.compute_scale, signal.compute_centre))
        self._asked = self._asked or bool(near.any())
        self._largest_gap = max(self._largest_gap, float(gaps.abs().max()) if gaps.numel() else 0.0)
        self._found |= {"opd/scale": scale, "opd/centre": centre, "opd/teacher/waited": waited}
        self._note(student, teacher, excluded, gaps)
        if opd.schedule.by == "gap":
            self._follow(self._found["opd/gap/abs_mean"])
            near = near & self._eligible[:, None]
            teacher = torch.where(near, teacher, math.nan)
        alike = torch.ones(len(near), dtype=torch.float32)
        factor, flags = alike * (self._factor / scale), self._eligible.to(torch.int8)
        batch.put(**{TEACHER: teacher, ROW: flags, FACTOR: factor, CENTRE: alike * centre})
        self._sent = name_hashes(batch, columns["responses"], near, teacher)
        if opd.mode == "loss":
            return None
        taught = columns["response_mask"].bool() & self._eligible[:, None]
        how = {"coef": opd.coef * self._factor, "max_gap": opd.max_gap, "scale": scale, "centre": centre}
        replaced = signal.advantages(advantages, student, teacher, taught, horizon=opd.horizon, **how)
        dealt = replaced[near]
        self._found |= {
            "opd/advantage/abs_mean": mean(dealt.abs()),
            "opd/advantage/positive_share": mean(dealt > 0),
        }
        return replaced

    def _note(self, student: Tensor, teacher: Tensor, excluded: Tensor, gaps: Tensor) -> None:
        """Check that the teacher's log-probs belong to their tokens, and record metrics of the answers."""
        near, scorings = self._near, [each.scoring for each in self._teachers.values()]
        rows = [row for scoring in scorings for row in scoring.rows]
        raw = torch.where(near & ~excluded, student - teacher, 0.0).abs()
        first = near & (near.cumsum(-1) == 1)
        last = near & (near.flip(-1).cumsum(-1).flip(-1) == 1)
        known = []
        for source, each in self._teachers.items():
            asked = self._near_of(source)
            found = each.alignment.judge(tally_agreements(student, teacher, asked))
            known += [found["concordance_rows"]] if "concordance_rows" in found else []
            if source:
                self._found[f"opd/source/{source}/rows"] = float(asked.any(-1).sum())
                self._found[f"opd/source/{source}/gap_abs_mean"] = mean(gaps[asked].abs())
        self._found |= {
            "opd/teacher/seconds": max(scoring.seconds for scoring in scorings),
            "opd/teacher/rows": float(len(rows)),
            "opd/teacher/tokens": float(sum(len(row.prompt) + len(row.response) for row in rows)),
            "opd/teacher/retried": float(sum(scoring.retried for scoring in scorings)),
            "opd/gap/mean": mean(gaps[near]),
            "opd/gap/abs_mean": mean(gaps[near].abs()),
            "opd/gap/extreme_share": mean(((raw > self.opd.extreme) | excluded)[near]),
            "opd/gap/clipped_share": mean(((raw > self.opd.max_gap) | excluded)[near]),
            "opd/gap/excluded_tokens": float(excluded.sum()),
            "opd/gap/first_token": mean(gaps[first]),
            "opd/gap/end_token": mean(gaps[last]),
            "opd/live/concordance": min(known, default=math.nan),
        }

    def _near_of(self, source: str) -> Tensor:
        """Find the tokens that this data source's teacher has scored, (n, T) bool."""
        return self._near & torch.tensor([each == source for each in self._of], dtype=torch.bool)[:, None]

    def worker(self) -> OpdWorker:
        return OpdWorker(self.opd)

    @property
    def sent(self) -> Mapping[str, int]:
        return self._sent

    def silence(self, batch: BatchView, rows: Tensor) -> None:
        self._eligible = self._eligible & ~rows
        batch.put(**{ROW: self._eligible.to(torch.int8)})
        silent = {key for key, is_silent in zip(batch.keys, rows.tolist(), strict=True) if is_silent}
        self._sent = {key: number for key, number in self._sent.items() if key not in silent}

    def judge(self, reports: Sequence[OpdReport]) -> Mapping[str, float]:
        check_reports(reports, self.opd.mode)
        found = dict(summarize_reports(reports, self.opd.coef * self._factor, self._epochs))
        if any(report.visible for report in reports) and not self._proved:
            self._proved = True
            scored, error = sum(report.tokens for report in reports), found["opd/live/error"]
            logger.info(
                "opd %s LIVE on %d sequences, %d tokens (error %.1g), teacher %s",
                *(self.opd.mode, len(self._sent), scored, error, self.opd.shown),
            )
        self._watch(found["opd/share_of_loss"])
        return found | {"opd/live/proved": float(self._proved)}

    def unproved(self) -> str | None:
        gate = self.opd.eligible
        if not self._asked:
            return (
                f"no rollout was eligible (opd.eligible.passed_above={gate.passed_above:g}, "
                f"opd.eligible.max_pass_rate={gate.max_pass_rate:g})."
            )
        if self._factor == 0:
            return "the scheduled coefficient is 0 (opd.schedule)."
        if self._largest_gap <= SILENT:
            return (
                f"no log-prob of the teacher differs from the student's by more than {SILENT:g} nats, so the teacher "
                "teaches nothing (opd.teacher.url)."
            )
        return None if self._proved else "no scored token had a gradient (opd.coef)."

    def _watch(self, share: float) -> None:
        """Warn if the teacher dominates the rewards, or if no rollout has been eligible for many updates."""
        self._dominated = self._dominated + 1 if share > DOMINATES else 0
        if self._dominated == UPDATES:
            logger.warning(
                "opd: the teacher's share of the loss's gradient was %.0f %% for %d updates. With opd.coef=%.2g the "
                "share would be one half.",
                *(100 * share, UPDATES, self.opd.coef * (1 - share) / share),
            )
        self._idle = 0 if self._sent or self._factor == 0 else self._idle + 1
        if self._idle == IDLE:
            logger.warning(
                "opd has no effect: no rollout was eligible in %d updates. Fix: set a larger "
                "opd.eligible.max_pass_rate, or change opd.eligible.passed_above.",
                IDLE,
            )

    def metrics(self) -> Mapping[str, float]:
        return self._found
