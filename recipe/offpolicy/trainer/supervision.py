"""Supervises a trainer's updates: proves the correction, and keeps the metrics of the last update.

Supervision is the same for all trainers; a trainer only provides batches and metrics.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor

from ..batch.plan import PROVE, PROVE_EVERY, SharedPlan
from ..correction import CorrectionSpec
from ..correction.correction_parts import TOLERANCE, WITHOUT_FORWARD
from ..correction.row_layout import count_tokens_by_row
from ..correction.spec import format_part_path
from ..correction.statistics import Statistic, merge_all
from ..delivery.checksums import SECTION
from ..extensions.add_ons import AddOns
from ..monitor.active_correction import ActiveCorrection
from ..monitor.alarms import StaleRowsWatch, format_watched
from ..monitor.mismatch_shares import RecentFloor
from ..proof.rollout_log_probs import RolloutChecker, SameEngineCheck
from ..proof.verify import LivenessError, describe_proof, describe_rest, verify, verify_update
from ..worker.metrics import take_packets

logger = logging.getLogger("verl.offpolicy")

AFTER_MOVED = 10
"""Number of updates between two proofs if bounds have moved since the last proof; bounds may move at every update."""
_COARSE = (
    "log-probs reach the loss in 16 bits. Rounding of up to 0.03 nats per token looks like mismatch, and makes masks "
    "with narrow bounds reject tokens. Compute log-probs in float32 in the trainer."
)


class Supervision:
    """Checks each update by the reports (packets) that the workers' loss sent.

    Args:
        spec: the configured correction.
        config: the composed configuration of the run.
        add_ons: add-ons, each of which checks its own reports on every update.

    Attributes:
        proving: True if the active correction has not been proved yet; the next update must prove it.
        proof: a sentence and the evidence if the last update proved the correction; None otherwise.
        active_correction: the active correction and its bounds.
    """

    def __init__(self, spec: CorrectionSpec, config: DictConfig, add_ons: AddOns | None = None) -> None:
        self._add_ons = add_ons if add_ons is not None else AddOns()
        self.active_correction = ActiveCorrection(spec, config)
        for line in format_watched(spec, config):
            logger.info(line)
        self.proving = True
        self._prove_every = int(OmegaConf.select(config, PROVE_EVERY, default=50))
        self._since_proof = 0  # updates
        self._proved_bounds = self.active_correction.bounds
        self._marked: int | None = None  # rows of this update whose micro-batches must be proved
        self._epochs = config.actor_rollout_ref.actor.ppo_epochs
        self._allow_identical = config.offpolicy.allow_identical_log_probs
        self._floor = RecentFloor()
        self._stale_rows = StaleRowsWatch()
        self._samples = RolloutChecker(allow_unrelated=config.offpolicy.allow_unrelated_log_probs)
        self._same_engine = SameEngineCheck() if spec.proximal == "same_engine" else None
        self._sampled_rows: list[int] = []
        self._live: dict[str, float] = {}
        self._plan: SharedPlan | None = None
        self._statistics: dict[str, float] = {}
        self._step: dict[str, Statistic] = {}
        self.proof: tuple[str, dict[str, float]] | None = None

    @property
    def spec(self) -> CorrectionSpec:
        """The active correction, which the workers must apply at the next update."""
        return self.active_correction.spec

    @property
    def wants_sampled(self) -> bool:
        """True if the trainer must call ``sampled`` and ``aligned`` with each batch."""
        return not self.spec.is_none

    def sampled(self, rows: TensorDict) -> None:
        """Check a rollout and store its checksums before other code can change it; ``rows`` contains ``SAMPLED``.

        Raises:
            RolloutLogProbError: the rollout's log-probs are missing or invalid.
        """
        self._sampled_rows = self._samples.check_sampled(rows)

    def aligned(self, rows: TensorDict, uids: Sequence[str] | None) -> None:
        """Compare the rollout's log-probs with the trainer's; see ``rollout_log_probs.RolloutChecker.check_aligned``.

        Raises:
            AlignmentError: the log-probs are off by one token or belong to other rows.
        """
        self._samples.check_aligned(rows, uids)

    @property
    def takes_mu(self) -> bool:
        """True if this step uses mu as pi_old, without a forward pass."""
        if self._same_engine is not None:
            return self._same_engine.passed
        return self.spec.proximal in WITHOUT_FORWARD

    def scored(self, rows: TensorDict, uids: Sequence[str], step: int) -> bool:
        """Decide whether mu may replace pi_old; ``rows`` contains the columns in ``ALIGNED``.

        Returns:
            Whether mu replaces pi_old in this batch and all later ones.

        Raises:
            SameEngineError: mu differs from pi_old, so it must not replace pi_old.
        """
        if self._same_engine is None:
            return False
        self._same_engine.judge(rows, uids, step)
        if self._same_engine.largest is not None:
            logger.info(
                "correction.proximal=same_engine: |mu - pi_old| is at most %.3g nats on every token of step %d, "
                "below the limit of %g. From the next step on, mu is used as pi_old, without a forward pass.",
                self._same_engine.largest,
                step,
                TOLERANCE,
            )
        return True

    def expect(self, plan: SharedPlan) -> None:
        """Record the plan that is sent with the next update."""
        self._plan = plan

    @property
    def proof_due(self) -> bool:
        """True if the next update must prove the correction, for the first time or again."""
        if self.spec.is_none:
            return False
        if self.proving or not self._prove_every:
            return self.proving
        moved = self.active_correction.bounds != self._proved_bounds
        every = min(AFTER_MOVED, self._prove_every) if moved else self._prove_every
        return self._since_proof + 1 >= every

    def mark_proof(
        self, plan: SharedPlan, response_mask: Callable[[], Tensor], ranks: Callable[[], int]
    ) -> tuple[SharedPlan, dict[str, Tensor]]:
        """Mark rows; the workers must prove the correction in the micro-batches of these rows at this update.

        Args:
            plan: plan of the update.
            response_mask: returns the mask, (B, T) or nested by row; called only if something must be proved.
            ranks: returns the number of ranks that share the rows; called only if something must be proved.

        Returns:
            The plan to send, and the columns to send with it.
        """
        self._marked = None
        if not self.proof_due:
            return plan, {}
        tokens, seed = count_tokens_by_row(response_mask().bool()), f"{plan.step} {self._since_proof}"
        drawn = draw_rows(tokens, ranks(), seed=seed, first=self.proving)
        self._marked = int(drawn.sum())
        return replace(plan, prove=True), {PROVE: drawn}

    def collect(self, metrics: dict[str, Any]) -> bool:
        """Take the packets of one update out of the workers' ``metrics``, and check them.

        Returns:
            Whether the workers need another loss for the next update, because another correction is active.

        Raises:
            LivenessError: nothing proves that the configured correction takes effect.
            AlarmError: an alarm ends the run.
        """
        packets = take_packets(metrics)
        norms = metrics.get("grad_norm")  # verl's engines report one for each optimizer step
        expected: dict[str, Any] = {
            "sampled_rows": self._sampled_rows,
            "epochs": self._epochs,
            "plan": None if self._plan is None else self._plan.fingerprint(),
            "steps": len(norms) if isinstance(norms, list) else 0,
            "moving": self.active_correction.moving,
        }
        explained, self.proof = False, None
        self._since_proof += 1
        if self.proving or self._marked is not None:
            live = verify(
                packets,
                self.spec,
                **expected,
                allow_identical=self._allow_identical,
                marked=self._marked,
                again=not self.proving,
            )
            proved = self.spec.is_none or bool(live["proved"])
            if proved or self.proving:
                self._live = live
            if proved:
                self._since_proof, self._proved_bounds = 0, self.active_correction.bounds
            if self.proving:
                self._say(proved)
                self.proof = (describe_proof(self.spec, self._live), dict(self._live)) if proved else None
                explained = proved
            elif proved:
                logger.info("proved again: %s", describe_proof(self.spec, self._live))
            self.proving = self.proving and not proved
            self._marked = None
        else:
            verify_update(packets, self.spec, **expected)
        self._add_ons.judge([packet.reports for packet in packets], self._epochs)
        if explained:
            add_ons = {"delivery": f"{SECTION} is off"} | self._add_ons.unproved
            logger.info(describe_rest(self.spec, self._live, self._plan.sealed if self._plan else (), add_ons))
        if self.spec.proximal != "recompute":
            self._samples.check_tallies(packet.alignment for packet in packets)
        merged = merge_all(packet.statistics for packet in packets)
        self._step = merge_all([self._step, merged])
        measured = {name: statistic.value() for name, statistic in merged.items()}
        switched = self.active_correction.after_update(
            measured, merge_all(packet.histograms for packet in packets), self._add_ons.metrics()
        )
        self.proving = self.proving or switched
        self._statistics = self._values(merged)
        self._floor.add(merged)
        self._stale_rows.see(measured)
        return switched

    def begin_step(self) -> None:
        """Reset the values of the last step, which may have had several updates."""
        self._step = {}

    def step_metrics(self) -> dict[str, float]:
        """Return the merged metrics of all updates since ``begin_step``; empty if there were none."""
        return {f"offpolicy/{name}": value for name, value in self._values(self._step).items()} if self._step else {}

    def _values(self, merged: dict[str, Statistic]) -> dict[str, float]:
        values = {name: statistic.value() for name, statistic in merged.items()}
        sealed = len(self._plan.sealed if self._plan else ())
        live = self._live | {"sealed": float(sealed), "updates_since_proof": float(self._since_proof)}
        values |= self._floor.compute_shares(merged) | {f"live/{name}": value for name, value in live.items()}
        values |= {} if self._same_engine is None else self._same_engine.metrics()
        return values | self._samples.metrics() | self.active_correction.metrics()

    def begin(self) -> None:
        """Reset the values of the last update, so that an update that bypasses the correction is detected."""
        self._statistics = {}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the update since ``begin``, under their logged names.

        Raises:
            LivenessError: nothing was collected.
        """
        if not self._statistics:
            raise LivenessError("the update bypassed the correction: the workers returned none of its metrics.")
        return {f"offpolicy/{name}": value for name, value in self._statistics.items()}

    def _say(self, proved: bool) -> None:
        if not proved:
            logger.warning("the correction is not proved yet, because no token of this update had a gradient.")
            return
        logger.info(describe_proof(self.spec, self._live))
        if moving := ", ".join(map(format_part_path, self.active_correction.moving)):
            logger.info("the bounds of %s are sent with each update; the fingerprint excludes them.", moving)
        if self._live.get("log_prob_bits", 32) < 32:
            logger.warning(_COARSE)


ENOUGH = 256
"""Minimum number of response tokens with which copied or shifted log-probs can be distinguished from a coincidence."""


def draw_rows(tokens: Tensor, ranks: int, *, seed: str, first: bool) -> Tensor:
    """Draw rows of an update, (B,) int64: 0 if not drawn, 1 if drawn, 2 if its micro-batch must also run trials.

    Args:
        tokens: (B,) number of response tokens of each row; the rows of each rank are contiguous.
        seed: seed of the draw.
        first: if True, draw the first, the last, the longest and a random row of each rank, and more rows until the
            drawn rows have ``ENOUGH`` tokens; if False, draw one random row of each rank. Rows without response tokens
            are skipped if the rank has other rows. Trials run in the micro-batch of the longest drawn row.

    Example:
        >>> draw_rows(torch.tensor([3, 0, 9]), 1, seed="1", first=True).tolist()
        [1, 0, 2]
    """
    lengths = tokens.long().tolist()
    drawn = torch.zeros(len(lengths), dtype=torch.int64)
    for rank in range(ranks):
        share = range(rank * len(lengths) // ranks, (rank + 1) * len(lengths) // ranks)
        rows = [row for row in share if lengths[row]] or list(share)
        if not rows:
            continue
        order = random.Random(f"{seed} {rank}").sample(rows, len(rows))
        chosen = set(order[:1])
        if first:
            chosen |= {rows[0], rows[-1], max(rows, key=lengths.__getitem__)}
            for row in order[1:]:
                if sum(lengths[each] for each in chosen) >= ENOUGH:
                    break
                chosen.add(row)
        drawn[sorted(chosen)] = 1
        drawn[max(chosen, key=lengths.__getitem__)] = 2
    return drawn
