"""On-policy distillation as an extension: trains on a teacher's log-probs for failed rollouts of hard prompts.

A batch's requests to the teacher start as soon as its rewards are known, and run while the workers compute pi_old. The
computation of advantages waits for the answers. ``opd=advantage`` replaces the advantages of eligible tokens with K1;
``opd=loss`` adds K2 to the loss.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ...batch.declared_keys import Configured
from ...correction import Problem
from ...proof.rewards import check_rewards, mean
from ...proof.token_alignment import AlignmentChecker, tally_agreements
from ..add_on import Extension
from ..advantage_proof import name_hashes
from ..batch_view import BatchView, last_outputs, read_plain
from . import signal
from .opd_worker import (
    OpdReport,
    OpdWorker,
    build_alignment,
    check_repeated,
    check_reports,
    check_teacher,
    summarize_reports,
)
from .settings import OpdSettings
from .signal import CENTRE, FACTOR, ROW, TEACHER
from .start_up import find_model, find_problems
from .teacher_client import Row, Scoring, TeacherClient

logger = logging.getLogger("verl.offpolicy")

DOMINATES, UPDATES = 0.9, 3
"""Share of the total pull on the loss above which the teacher counts as dominating the rewards, and number of
consecutive updates with such a share before the warning."""
PROBES = 2
"""Number of rows per batch that are scored again."""
SILENT = 1e-3
"""Largest gap, in nats, between two engines with the same weights."""
IDLE = 20
"""Number of consecutive updates without an eligible row before the warning."""


class OnPolicyDistillation(Extension):
    """Extension for the distillation of one run; see ``settings.OpdSettings`` for its section."""

    phase = "teacher"

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.opd = OpdSettings.from_mapping(section, settings)
        self._clients: dict[str, TeacherClient] = {}
        self._scorings: dict[str, Scoring] = {}
        self._of: list[str | None] = []
        self._source_key = "data_source"
        self._factor, self._epochs = 1.0, 1
        self._eligible = torch.zeros(0, dtype=torch.bool)
        self._near = torch.zeros(0, 0, dtype=torch.bool)
        self._sent: dict[str, int] = {}
        self._found: dict[str, float] = {}
        self._alignments: dict[str, AlignmentChecker] = {}
        self._concordance = math.nan
        self._probes: list[tuple[str, Scoring, list[float] | None, str]] = []
        self._first: dict[str, tuple[Row, list[float]]] = {}
        self._probed_at: dict[str, int] = {}
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
            return (
                f"its loss term, {self.opd.coef:g} K2 of eligible tokens, is not replayed: the figures show only the "
                "policy term."
            )
        return (
            "advantages of eligible tokens were computed from the teacher and the run's log pi_old, and are replayed "
            "unchanged: training with another correction.proximal would have produced other advantages."
        )

    @property
    def reads_old_log_prob(self) -> bool:
        return True

    @property
    def noted(self) -> Mapping[str, Any]:
        """All settings except those for reaching the teacher."""
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
        for source, teacher in self.opd.teachers.items():
            self._clients[source] = TeacherClient(teacher, *find_model(teacher))
            self._alignments[source] = build_alignment(allow_unrelated=unrelated)

    def end(self) -> None:
        for client in self._clients.values():
            client.close()

    def on_rollout(self, batch: BatchView) -> None:
        mask = batch.rows("response_mask")["response_mask"].bool()
        self._of = self._choose_teachers(batch)
        self._eligible = self._find_eligible(batch, mask)
        if self.opd.schedule.by in ("step", "pass_rate"):
            self._follow(batch.step if self.opd.schedule.by == "step" else self._found["opd/pass_rate"])
        self._near = signal.find_horizon(mask & self._eligible[:, None], self.opd.horizon)
        rows: dict[str, list[Row]] = {source: [] for source in self._clients}
        for number, (prompt, response) in enumerate(batch.token_ids):
            if self._near[number].any():
                last = int(self._near[number].nonzero()[-1]) + 1
                rows[str(self._of[number])].append(Row(number, tuple(prompt), tuple(response[:last])))
        self._scorings = {source: self._clients[source].start(asked) for source, asked in rows.items()}
        self._probes = []
        for source, asked in rows.items():
            self._start_probes(source, asked, batch.step)

    def _choose_teachers(self, batch: BatchView) -> list[str | None]:
        """Choose each row's teacher by the row's data source; None if the source has no teacher."""
        default = "" if "" in self._clients else None
        if not self._clients.keys() - {""}:
            return [default] * len(batch.uids)
        sources = read_plain(batch, self._source_key)
        return [str(source) if str(source) in self._clients else default for source in sources]

    def _follow(self, value: float) -> None:
        """Set the schedule's factor; with a factor of 0, no row is eligible."""
        plan = self.opd.schedule
        if not math.isnan(value):
            assert plan.start is not None
            assert plan.end is not None
            self._factor = signal.compute_factor(value, start=plan.start, end=plan.end, final=plan.final)
        if self._factor == 0:
            self._eligible = torch.zeros_like(self._eligible)
            self._found["opd/frac_opd_samples"] = 0.0

    def _start_probes(self, source: str, rows: Sequence[Row], step: int) -> None:
        """Request scores again for two rows of the batch, each on its own, and for the first row of the run."""
        client, every = self._clients[source], self.opd.teachers[source].probe_every
        probed = self._probed_at.get(source)
        if every is None or not rows or (probed is not None and step < probed + every):
            return
        self._probed_at[source] = step
        for row in random.Random(step).sample(rows, min(PROBES, len(rows))):
            self._probes.append((source, client.start([row]), None, f"sequence {row.number} was scored again, alone"))
        if source in self._first:
            row, answer = self._first[source]
            what = "a sequence of an earlier step was scored again"
            self._probes.append((source, client.start([row]), answer, what))

    def _check_probes(self, answers: Mapping[int, list[float]]) -> None:
        for source, scoring, first, what in self._probes:
            ((row,), (again,)) = scoring.rows, self._clients[source].wait(scoring)
            check_repeated(answers[row.number] if first is None else first, again, what)
            self._first.setdefault(source, (row, again))

    def _find_eligible(self, batch: BatchView, mask: Tensor) -> Tensor:
        """Find the eligible rows, (n,) bool: rows of eligible sessions that have a token; also record the shares."""
        gate = self.opd.eligible
        check_rewards(batch.scores, batch.uids, f"step {batch.step}")
        rewards = (batch.scores.double() * mask).sum(-1)
        sessions, uids = list(batch.sessions), list(batch.uids)
        counted = [row for row in last_outputs(batch) if mask[row].any()]
        groups = [uids[row] for row in counted]
        chosen = signal.eligible(
            rewards[counted], groups, passed_above=gate.passed_above, max_pass_rate=gate.max_pass_rate, rows=gate.rows
        )
        rates = signal.compute_pass_rates(rewards[counted], groups, passed_above=gate.passed_above)
        hard = {uid for uid, rate in zip(groups, rates.tolist(), strict=True) if rate <= gate.max_pass_rate}
        self._found = {
            "opd/frac_opd_samples": float(chosen.double().mean()) if len(chosen) else math.nan,
            "opd/frac_underperforming_prompts": len(hard) / len(set(groups)) if groups else math.nan,
            "opd/pass_rate": mean(signal.find_passed(rewards[counted], gate.passed_above)),
        }
        of = {sessions[row] for row, is_chosen in zip(counted, chosen.tolist(), strict=True) if is_chosen}
        taught = [session in of and source is not None for session, source in zip(sessions, self._of, strict=True)]
        return torch.tensor(taught) & mask.any(-1)

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        before = time.monotonic()
        answers = {
            row.number: values
            for source, scoring in self._scorings.items()
            for row, values in zip(scoring.rows, self._clients[source].wait(scoring), strict=True)
        }
        self._check_probes(answers)
        waited = time.monotonic() - before
        columns = batch.rows("responses", "old_log_probs", "response_mask")
        student, near = columns["old_log_probs"].float(), self._near
        teacher = torch.full(near.shape, math.nan, dtype=torch.float32)
        for row, values in answers.items():
            teacher[row, : len(values)] = torch.tensor(values)
        teacher[~near] = math.nan
        for source in self._clients:
            check_teacher(student, teacher, self._near_of(source))
        excluded = near & torch.isneginf(teacher)
        # For an excluded token, the finite log-prob whose gap is at the bound is sent instead.
        teacher = torch.where(excluded, student - self.opd.max_gap, teacher)
        gaps = signal.compute_gaps(student, teacher, near, max_gap=self.opd.max_gap)
        divides = self.opd.mode == "advantage"
        scale = signal.compute_scale(gaps, near, self.opd.scale) if divides else 1.0
        centre = signal.compute_centre(gaps, near, self.opd.scale) if divides else 0.0
        self._concordance = math.nan
        for source, alignment in self._alignments.items():
            found = alignment.judge(tally_agreements(student, teacher, self._near_of(source)))
            # NaN counts as infinite here, so it remains only if all values are NaN.
            known = found.get("concordance_rows", math.nan), self._concordance
            self._concordance = min(known, key=lambda each: math.inf if math.isnan(each) else each)
        self._asked = self._asked or bool(near.any())
        self._largest_gap = max(self._largest_gap, float(gaps.abs().max()) if gaps.numel() else 0.0)
        self._found |= {"opd/scale": scale, "opd/centre": centre, "opd/teacher/waited": waited}
        self._note(student, teacher, excluded, gaps)
        if self.opd.schedule.by == "gap":
            self._follow(self._found["opd/gap/abs_mean"])
            near = near & self._eligible[:, None]
            teacher = torch.where(near, teacher, math.nan)
        flags = self._eligible.to(torch.int8)
        alike = torch.ones(len(flags), dtype=torch.float32)
        batch.put(
            **{TEACHER: teacher, ROW: flags, FACTOR: alike * (self._factor / scale), CENTRE: alike * centre},
        )
        self._sent = name_hashes(batch, columns["responses"], near, teacher)
        if self.opd.mode == "loss":
            return None
        taught = columns["response_mask"].bool() & self._eligible[:, None]
        replaced = signal.advantages(
            advantages,
            student,
            teacher,
            taught,
            coef=self.opd.coef * self._factor,
            max_gap=self.opd.max_gap,
            scale=scale,
            horizon=self.opd.horizon,
            centre=centre,
        )
        dealt = replaced[near]
        self._found |= {
            "opd/advantage/abs_mean": mean(dealt.abs()),
            "opd/advantage/positive_share": mean((dealt > 0).double()),
        }
        return replaced

    def _note(self, student: Tensor, teacher: Tensor, excluded: Tensor, gaps: Tensor) -> None:
        """Record metrics of the teacher's answers."""
        near, scorings = self._near, self._scorings.values()
        rows = [row for scoring in scorings for row in scoring.rows]
        raw = torch.where(near & ~excluded, student - teacher, 0.0).abs()
        extreme = (raw > self.opd.extreme) | excluded
        first = near & (near.cumsum(-1) == 1)
        last = near & (near.flip(-1).cumsum(-1).flip(-1) == 1)
        self._found |= {
            "opd/teacher/seconds": max(scoring.seconds for scoring in scorings),
            "opd/teacher/rows": float(len(rows)),
            "opd/teacher/tokens": float(sum(len(row.prompt) + len(row.response) for row in rows)),
            "opd/teacher/retried": float(sum(scoring.retried for scoring in scorings)),
            "opd/gap/mean": mean(gaps[near]),
            "opd/gap/abs_mean": mean(gaps[near].abs()),
            "opd/gap/extreme_share": mean(extreme[near].double()),
            "opd/gap/clipped_share": mean(((raw > self.opd.max_gap) | excluded)[near].double()),
            "opd/gap/excluded_tokens": float(excluded.sum()),
            "opd/gap/first_token": mean(gaps[first]),
            "opd/gap/end_token": mean(gaps[last]),
            "opd/live/concordance": self._concordance,
        }
        for source in self._clients.keys() - {""}:
            asked = self._near_of(source)
            self._found[f"opd/source/{source}/rows"] = float(asked.any(-1).sum())
            self._found[f"opd/source/{source}/gap_abs_mean"] = mean(gaps[asked].abs())

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
        scored = sum(report.tokens for report in reports)
        visible = any(report.visible for report in reports)
        if visible and not self._proved:
            self._proved = True
            logger.info(
                "opd %s LIVE on %d sequences, %d tokens (error %.1g), teacher %s",
                self.opd.mode,
                len(self._sent),
                scored,
                found["opd/live/error"],
                self.opd.shown,
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
        """Warn if the teacher dominates the rewards, or if no rollout has been eligible for a long time."""
        self._dominated = self._dominated + 1 if share > DOMINATES else 0
        if self._dominated == UPDATES:
            logger.warning(
                "opd: the teacher's share of the loss's pull was %.0f %% for %d updates. With opd.coef=%.2g the "
                "share would be one half.",
                100 * share,
                UPDATES,
                self.opd.coef * (1 - share) / share,
            )
        self._idle = 0 if self._sent or self._factor == 0 else self._idle + 1
        if self._idle == IDLE:
            logger.warning(
                "opd does nothing: no rollout was eligible in %d updates. Fix: set a larger "
                "opd.eligible.max_pass_rate, or another opd.eligible.passed_above.",
                IDLE,
            )

    def metrics(self) -> Mapping[str, float]:
        return self._found
