"""On-policy distillation as an extension: asks a teacher about failed rollouts of hard prompts, and trains on it.

A batch's requests start as soon as its rewards are known, and run while the workers compute pi_old; the computation of
advantages waits for them. ``opd=advantage`` replaces the advantages of eligible tokens by K1, ``opd=loss`` adds K2 to
the loss.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ...batch.rewards import check_rewards
from ...correction import Problem
from ...proof.token_alignment import tally_agreements
from ..advantage_proof import name_hashes
from ..batch_view import BatchView, last_outputs
from ..extension import Extension
from .columns import ROW, SCALE, TEACHER
from .eligibility import compute_pass_rates, eligible, find_passed
from .evidence import build_alignment, check_repeated, check_reports, check_teacher, summarize_reports
from .opd_worker import OpdReport, OpdWorker
from .settings import OpdSettings
from .signal import advantages as replace_advantages
from .signal import compute_gaps, compute_scale, find_horizon
from .teacher_client import Row, Scoring, TeacherClient

logger = logging.getLogger("verl.offpolicy")

DOMINATES, UPDATES = 0.9, 3
"""Share of the loss's pull above which the teacher dominates the rewards, and updates in a row before the warning."""
PROBES = 2
"""Number of rows per batch that are scored again."""
SILENT = 1e-3
"""Largest gap, in nats, between two engines with the same weights."""
IDLE = 20
"""Updates in a row without an eligible row before the warning."""


class OnPolicyDistillation(Extension):
    """Distillation of one run; see ``settings.OpdSettings`` for its section."""

    phase = "teacher"

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.opd = OpdSettings.from_mapping(section, settings)
        self._client: TeacherClient | None = None
        self._scoring: Scoring | None = None
        self._eligible = torch.zeros(0, dtype=torch.bool)
        self._near = torch.zeros(0, 0, dtype=torch.bool)
        self._sent: dict[str, int] = {}
        self._found: dict[str, float] = {}
        self._alignment = build_alignment(allow_unrelated=False)
        self._concordance = math.nan
        self._probes: list[tuple[Scoring, list[float] | None, str]] = []
        self._first: tuple[Row, list[float]] | None = None
        self._probed_at: int | None = None
        self._proved = self._asked = False
        self._largest_gap = 0.0
        self._dominated = self._idle = 0

    # Before Ray starts --------------------------------------------------------------------------------------

    @property
    def meaning(self) -> str:
        opd, gate = self.opd, self.opd.eligible
        horizon = "" if opd.horizon is None else f", first {opd.horizon} tokens"
        return (
            f"{opd.mode}, coef={opd.coef:g}, {gate.rows} rollouts of prompts with a pass rate of at most "
            f"{gate.max_pass_rate:g}{horizon}, teacher {', '.join(opd.teacher.shown)}"
        )

    @property
    def replay_note(self) -> str:
        if self.opd.mode == "loss":
            return (
                f"its term, {self.opd.coef:g} K2 of eligible tokens, is not replayed: the figures show the policy term."
            )
        return (
            "advantages of eligible tokens are the teacher's, made with log pi_old of the run, and are replayed "
            "unchanged: training with another correction.proximal would have had other advantages."
        )

    @property
    def reads_old_log_prob(self) -> bool:
        return True

    @property
    def noted(self) -> Mapping[str, Any]:
        """All settings except how the teacher is reached."""
        return {name: value for name, value in self.settings.items() if name != "teacher"}

    def problems(self, config: DictConfig) -> Sequence[Problem]:
        from .start_up import find_problems

        return tuple(find_problems(self.section, self.opd, config))

    # In the trainer -----------------------------------------------------------------------------------------

    def begin(self, config: DictConfig) -> None:
        from .teacher_checks import find_model

        self._client = TeacherClient(self.opd.teacher, *find_model(self.opd.teacher))
        unrelated = config is not None and OmegaConf.select(config, "offpolicy.allow_unrelated_log_probs")
        self._alignment = build_alignment(allow_unrelated=bool(unrelated))

    def end(self) -> None:
        if self._client is not None:
            self._client.close()

    def on_rollout(self, batch: BatchView) -> None:
        assert self._client is not None
        mask = batch.rows("response_mask")["response_mask"].bool()
        self._eligible = self._find_eligible(batch, mask)
        self._near = find_horizon(mask & self._eligible[:, None], self.opd.horizon)
        rows = []
        for number, (prompt, response) in enumerate(batch.token_ids):
            if self._near[number].any():
                last = int(self._near[number].nonzero()[-1]) + 1
                rows.append(Row(number, tuple(prompt), tuple(response[:last])))
        self._scoring = self._client.start(rows)
        self._start_probes(rows, batch.step)

    def _start_probes(self, rows: Sequence[Row], step: int) -> None:
        """Request two rows of the batch again, each alone, and the first row of the run."""
        assert self._client is not None
        every, self._probes = self.opd.teacher.probe_every, []
        if every is None or not rows or (self._probed_at is not None and step < self._probed_at + every):
            return
        self._probed_at = step
        for row in random.Random(step).sample(rows, min(PROBES, len(rows))):
            self._probes.append((self._client.start([row]), None, f"sequence {row.number} was scored again, alone"))
        if self._first is not None:
            row, answer = self._first
            self._probes.append((self._client.start([row]), answer, "a sequence of an earlier step was scored again"))

    def _check_probes(self, answers: Sequence[list[float]]) -> None:
        assert self._client is not None
        assert self._scoring is not None
        by_number = dict(zip([row.number for row in self._scoring.rows], answers, strict=True))
        for scoring, first, what in self._probes:
            ((row,), (again,)) = scoring.rows, self._client.wait(scoring)
            check_repeated(by_number[row.number] if first is None else first, again, what)
            if self._first is None:
                self._first = row, again

    def _find_eligible(self, batch: BatchView, mask: Tensor) -> Tensor:
        """Find the eligible rows, (n,) bool: all outputs of an eligible session with a token; counts the shares."""
        gate = self.opd.eligible
        check_rewards(batch.scores, batch.uids, f"step {batch.step}")
        rewards = (batch.scores.double() * mask).sum(-1)
        sessions, uids = list(batch.sessions), list(batch.uids)
        counted = [row for row in last_outputs(batch) if mask[row].any()]
        groups = [uids[row] for row in counted]
        chosen = eligible(
            rewards[counted], groups, passed_above=gate.passed_above, max_pass_rate=gate.max_pass_rate, rows=gate.rows
        )
        rates = compute_pass_rates(rewards[counted], groups, passed_above=gate.passed_above)
        hard = {uid for uid, rate in zip(groups, rates.tolist(), strict=True) if rate <= gate.max_pass_rate}
        self._found = {
            "opd/frac_opd_samples": float(chosen.double().mean()) if len(chosen) else math.nan,
            "opd/frac_underperforming_prompts": len(hard) / len(set(groups)) if groups else math.nan,
            "opd/pass_rate": _mean(find_passed(rewards[counted], gate.passed_above)),
        }
        of = {sessions[row] for row, is_chosen in zip(counted, chosen.tolist(), strict=True) if is_chosen}
        return torch.tensor([session in of for session in sessions]) & mask.any(-1)

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        assert self._client is not None
        assert self._scoring is not None
        before = time.monotonic()
        answers = self._client.wait(self._scoring)
        self._check_probes(answers)
        waited = time.monotonic() - before
        columns = batch.rows("responses", "old_log_probs", "response_mask")
        student, near = columns["old_log_probs"].float(), self._near
        teacher = torch.full(near.shape, math.nan, dtype=torch.float32)
        for row, values in zip(self._scoring.rows, answers, strict=True):
            teacher[row.number, : len(values)] = torch.tensor(values)
        teacher[~near] = math.nan
        check_teacher(student, teacher, near)
        excluded = near & torch.isneginf(teacher)
        # Finite in transit, with its gap at the bound.
        teacher = torch.where(excluded, student - self.opd.max_gap, teacher)
        gaps = compute_gaps(student, teacher, near, max_gap=self.opd.max_gap)
        scale = compute_scale(gaps, near, self.opd.scale) if self.opd.mode == "advantage" else 1.0
        found = self._alignment.judge(tally_agreements(student, teacher, near))
        self._concordance = found.get("concordance_rows", math.nan)
        self._asked = self._asked or bool(near.any())
        self._largest_gap = max(self._largest_gap, float(gaps.abs().max()) if gaps.numel() else 0.0)
        self._note(student, teacher, near, excluded, gaps, scale, waited)
        flags = self._eligible.to(torch.int8)
        batch.put(**{TEACHER: teacher, ROW: flags, SCALE: torch.full((len(flags),), scale, dtype=torch.float32)})
        self._sent = name_hashes(batch, columns["responses"], near, teacher)
        if self.opd.mode == "loss":
            return None
        taught = columns["response_mask"].bool() & self._eligible[:, None]
        replaced = replace_advantages(
            advantages,
            student,
            teacher,
            taught,
            coef=self.opd.coef,
            max_gap=self.opd.max_gap,
            scale=scale,
            horizon=self.opd.horizon,
        )
        dealt = replaced[near]
        self._found |= {
            "opd/advantage/abs_mean": _mean(dealt.abs()),
            "opd/advantage/positive_share": _mean((dealt > 0).double()),
        }
        return replaced

    def _note(
        self,
        student: Tensor,
        teacher: Tensor,
        near: Tensor,
        excluded: Tensor,
        gaps: Tensor,
        scale: float,
        waited: float,
    ) -> None:
        """Record the batch's metrics."""
        scoring = self._scoring
        assert scoring is not None
        raw = torch.where(near & ~excluded, student - teacher, 0.0).abs()
        extreme = (raw > self.opd.extreme) | excluded
        first = near & (near.cumsum(-1) == 1)
        last = near & (near.flip(-1).cumsum(-1).flip(-1) == 1)
        self._found |= {
            "opd/scale": scale,
            "opd/teacher/seconds": scoring.seconds,
            "opd/teacher/waited": waited,
            "opd/teacher/rows": float(len(scoring.rows)),
            "opd/teacher/tokens": float(sum(len(row.prompt) + len(row.response) for row in scoring.rows)),
            "opd/teacher/retried": float(scoring.retried),
            "opd/gap/mean": _mean(gaps[near]),
            "opd/gap/abs_mean": _mean(gaps[near].abs()),
            "opd/gap/extreme_share": _mean(extreme[near].double()),
            "opd/gap/clipped_share": _mean(((raw > self.opd.max_gap) | excluded)[near].double()),
            "opd/gap/excluded_tokens": float(excluded.sum()),
            "opd/gap/first_token": _mean(gaps[first]),
            "opd/gap/end_token": _mean(gaps[last]),
            "opd/live/concordance": self._concordance,
        }

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
        found = dict(summarize_reports(reports, self.opd.coef))
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
                ", ".join(self.opd.teacher.shown),
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
        if self._largest_gap <= SILENT:
            return (
                f"no log-prob of the teacher differs from the student's by more than {SILENT:g} nats: it teaches "
                f"nothing (opd.teacher.url)."
            )
        return None if self._proved else "no scored token had a gradient (opd.coef)."

    def _watch(self, share: float) -> None:
        """Warn if the teacher dominates the rewards, or if no rollout has been eligible for long."""
        self._dominated = self._dominated + 1 if share > DOMINATES else 0
        if self._dominated == UPDATES:
            logger.warning(
                "opd: the teacher's share of the loss's pull was %.0f %% for %d updates. opd.coef=%.2g would make it "
                "one half.",
                100 * share,
                UPDATES,
                self.opd.coef * (1 - share) / share,
            )
        self._idle = 0 if self._sent else self._idle + 1
        if self._idle == IDLE:
            logger.warning(
                "opd does nothing: no rollout was eligible in %d updates. Fix: set a larger "
                "opd.eligible.max_pass_rate, or another opd.eligible.passed_above.",
                IDLE,
            )

    def metrics(self) -> Mapping[str, float]:
        return self._found


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan
