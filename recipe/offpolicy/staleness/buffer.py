"""verl's asynchronous replay buffer with the limit of ``offpolicy.staleness``, and the buffer's counts.

Overridden methods of ``ReplayBufferAsync`` in verl 0.9.1, see ``verl_patches.trainer_seams``: ``sample(self,
global_steps, partition_id, batch_size)``, ``wait_for_sampleable(self, global_steps, partition_id, target_count)``,
``_has_enough_samples(self, global_steps, partition_id, batch_size, sampleable_keys)``, ``_select_prompt_uids(self,
partition_id, sampleable_keys, batch_size)``, ``_terminal_eviction_reasons(self, global_steps, partition_id)``,
``_stale_terminal_keys(self, global_steps, partition_id)``, ``_evict_terminal_groups(self, global_steps, partition_id,
eviction_reasons)``, ``_wait_for_next_poll(self, partition_id, last_debug_time)``, and the prompt metadata of
``_sync_metadata_from_transfer_queue``.

verl returns finished groups in the order in which they were issued. If the rate is limited, a group becomes too old
only if other groups are used for training while it is still being sampled. verl's own ``wait`` does not prevent this:
it checks an unfinished prompt only in the last step in which it may be used, when more prompts may be due than fit into
a batch. In this module, ``wait`` skips an unfinished prompt only if all remaining prompts can still be used in time.
``drop`` is verl's own strategy, with a threshold of eta + 1; ``mask`` and ``refresh`` are implemented here and in the
trainer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from ..batch.weight_versions import OLDEST_VERSION
from .ages import ISSUED, AgeLimit, RowTag, check_newest, compute_age, format_eta
from .staleness_settings import ETA, StalenessSettings

ROOT = "offpolicy/staleness"


@dataclass
class Mean:
    """Sum and count of values, for their mean."""

    total: float = 0
    count: float = 0

    def add(self, values: Iterable[float]) -> None:
        """Add these values."""
        for value in values:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float:
        """The mean of the values; NaN if there are none."""
        return self.total / self.count if self.count else math.nan


class Tally:
    """Counts of the current step, and lengths since the start of the run.

    Attributes:
        issued, refreshed, lost: numbers of prompts that were issued, sampled again, and lost (never used for training,
            failed, filtered or replaced).
        room: number of prompts that could be issued when the step began.
        waited: seconds for which the trainer waited for rows.
        tokens, masked_tokens: numbers of tokens in all rows taken for training, and in the masked rows among them.
        in_flight, in_queue: for rows in the loss, number of versions of the weights created while the row was being
            sampled, and after it was finished.
        spans: for rows with per-token versions, number of versions that sampled the row.
        updates: ages of tokens, in updates.
        too_old, trained: lengths of rows that were too old, however these were handled, and of all other rows.
    """

    def __init__(self) -> None:
        self.too_old, self.trained = Mean(), Mean()
        self.begin()

    def begin(self) -> None:
        """Reset the step's counts."""
        self.issued = self.refreshed = self.lost = self.room = self.tokens = self.masked_tokens = 0
        self.waited = 0.0
        self.in_flight, self.in_queue, self.spans, self.updates = Mean(), Mean(), Mean(), Mean()

    def add_rows(self, kept: Sequence[RowTag], too_old: Sequence[RowTag], step: int) -> None:
        """Add the rows of one update of ``step``, and the rows that were removed from the update's loss."""
        self.trained.add(row.length for row in kept)
        self.too_old.add(row.length for row in too_old)
        masked = sum(row.length for row in too_old)
        self.masked_tokens += masked
        self.tokens += masked + sum(row.length for row in kept)
        self.in_flight.add(row.newest - row.version for row in kept)
        self.in_queue.add(compute_age(row.newest, step) for row in kept)

    def add_ages(self, mean: float, tokens: float, *, update: int, updates: int) -> None:
        """Add the mean age of the tokens of one update, in versions.

        Args:
            update: number of earlier updates in the same step.
            updates: number of updates per step; each step makes one version.
        """
        if tokens:
            self.updates.total += tokens * (mean * updates + update)
            self.updates.count += tokens

    def metrics(self, eta: float, waited_share: float) -> dict[str, float]:
        """Return the metrics of the step, under their logged names.

        Args:
            waited_share: share of the step's duration for which the trainer waited for rows.
        """
        values = {
            "eta": eta,
            "issued": self.issued,
            "room": self.room,
            "waited_seconds": self.waited,
            "waited_share": waited_share,
            "refreshed": self.refreshed,
            "masked_token_share": self.masked_tokens / self.tokens if self.tokens else 0.0,
            "lost_prompts": self.lost,
            "length_ratio": self.too_old.value / self.trained.value if self.trained.total else math.nan,
            "in_flight": self.in_flight.value,
            "in_queue": self.in_queue.value,
            "spans": self.spans.value,
            "updates_mean": self.updates.value,
        }
        return {f"{ROOT}/{name}": float(value) for name, value in values.items()}


def keeps_deadlines(due: Iterable[float], *, step: int, batch: int, left: int) -> bool:
    """Return True if all waiting prompts can still be used in time if they are returned in this order.

    Args:
        due: last step in which each prompt may be used for training, in the order in which the prompts were issued.
        step: the current step.
        batch: number of prompts used in each further step.
        left: number of prompts still to be used in this step.
    """
    return all(place <= left + max(last - step, 0) * batch for place, last in enumerate(due, 1))


logger = logging.getLogger("verl.offpolicy")

TRAIN = "train"
"""Partition of TransferQueue that contains the training rows."""
_ANEW = "."
"""Separator in a uid, followed by the number of times that the prompt was sampled again."""


class BoundedReplayBuffer(ReplayBufferAsync):
    """verl's buffer with a limit on the age of rows.

    Args:
        settings: settings of the staleness limit.
        limit: age limit; groups that exceed it are sampled again.
        tally: object that receives the counts.
        sample_anew: function that issues prompts again, under new uids.
        batch: number of prompts per step.
        clock: function that returns seconds.
        kwargs: verl's arguments except threshold and strategy.
    """

    def __init__(
        self,
        settings: StalenessSettings,
        limit: AgeLimit,
        tally: Tally,
        sample_anew: Callable[[TensorDict], None],
        batch: int,
        clock: Callable[[], float] = time.monotonic,
        **kwargs: Any,
    ) -> None:
        threshold = limit.oldest + 1 if settings.too_old == "drop" else None
        super().__init__(max_off_policy_threshold=threshold, max_off_policy_strategy="drop", **kwargs)
        self._settings, self._limit, self._tally = settings, limit, tally
        self._sample_anew, self._clock, self._batch = sample_anew, clock, batch
        self._step, self._taken = 0, 0
        self._looked: int | None = None

    def count_prompts(self, step: int | None = None) -> int:
        """Count the prompts of the training partition that are waiting, running or finished.

        Args:
            step: the step that is starting, if it has not issued prompts yet; the metadata from the end of the previous
                step is then still valid.
        """
        if step is None or self._looked != step - 1:
            self._sync_metadata_from_transfer_queue()
        return len(self.prompt_global_steps[TRAIN])

    def check_versions(self, step: int) -> None:
        """Check the rows that were finished by the end of ``step``, before the step's weights are sent to the servers.

        Raises:
            StalenessError: a rollout server reports a newer version than the version with which it samples.
        """
        self._sync_metadata_from_transfer_queue()
        self._looked = step
        check_newest(self.partitions[TRAIN], step, self._eta)

    @property
    def _eta(self) -> str:
        return format_eta(self._limit.eta)

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        if partition_id == TRAIN:
            check_newest(self.partitions[TRAIN], global_steps, self._eta)
        return super()._terminal_eviction_reasons(global_steps, partition_id)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        found = super().sample(global_steps, partition_id, batch_size)
        if partition_id == TRAIN:
            self._step, self._taken = global_steps, self._count_taken(global_steps) + batch_size
        return found

    def _count_taken(self, step: int) -> int:
        return self._taken if step == self._step else 0

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        enough: bool = super()._has_enough_samples(global_steps, partition_id, batch_size, sampleable_keys)
        if not enough or self._settings.too_old != "wait" or partition_id != TRAIN:
            return enough
        issued = self.prompt_global_steps[TRAIN]
        chosen, *_ = self._select_prompt_uids(TRAIN, sampleable_keys, batch_size)
        running = self.pending_keys[TRAIN] | self.running_keys[TRAIN]
        if not any(issued[uid] < issued[chosen[-1]] for uid in running):
            # No prompt is skipped, so waiting would not change the choice.
            return True
        left = max(self._batch - self._count_taken(global_steps) - batch_size, 0)
        rest = sorted(issued[uid] for uid in (running | sampleable_keys) - set(chosen))
        due = (each + self._limit.get_oldest(each) for each in rest)
        return keeps_deadlines(due, step=global_steps, batch=self._batch, left=left)

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> Any:
        begun = self._clock()
        try:
            return super().wait_for_sampleable(global_steps, partition_id, target_count)
        finally:
            if partition_id == TRAIN:
                self._tally.waited += self._clock() - begun

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        said: float = super()._wait_for_next_poll(partition_id, last_debug_time)
        # verl logs the waiting prompts whenever this time changes; the watchdog ends a run that hangs here.
        running = self.pending_keys[partition_id] | self.running_keys[partition_id]
        if said != last_debug_time and partition_id == TRAIN and running:
            issued = self.prompt_global_steps[partition_id]
            oldest = min(running, key=lambda uid: issued[uid])
            logger.warning(
                "the trainer waits while %d prompts are sampled; the oldest, %s, was issued in step %d (%s=%s, "
                "too_old=%s).",
                *(len(running), oldest, issued[oldest], ETA, self._eta, self._settings.too_old),
            )
        return said

    def _stale_terminal_keys(self, global_steps: int, partition_id: str) -> set[str]:
        if self._settings.too_old != "refresh" or partition_id != TRAIN:
            found: set[str] = super()._stale_terminal_keys(global_steps, partition_id)
            return found
        # Rows without a version are reported by the trainer.
        too_old = {
            key.split("_")[0]
            for key, tag in self.partitions[partition_id].items()
            if (version := tag.get(OLDEST_VERSION)) is not None
            and not self._limit.admits(version, tag[ISSUED], global_steps)
        }
        finished = too_old & self.finished_keys[partition_id]
        return {uid for uid in finished if count_refreshes(uid) < self._settings.refresh_limit}

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        stale, filtered, *_ = eviction_reasons
        # As in verl, groups that verl's filter removes are replaced with other prompts.
        anew = sorted(stale - filtered) if self._settings.too_old == "refresh" else []
        prompts = tq.kv_batch_get(keys=anew, partition_id=partition_id) if anew else None
        if partition_id == TRAIN:
            self._tally.too_old.add(
                tag["response_len"] for key, tag in self.partitions[TRAIN].items() if key.split("_")[0] in stale
            )
        evicted, *rest = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
        if prompts is not None:
            prompts["uid"] = NonTensorStack(*(name_anew(str(uid)) for uid in prompts["uid"]))
            self._tally.refreshed += len(anew)
            self._sample_anew(prompts)
        elif self._settings.too_old == "drop":
            self._tally.lost += len(stale)
        # verl replaces the prompts that this method returns.
        return (evicted - set(anew), *rest)


def count_refreshes(uid: str) -> int:
    """Count how often the prompt with this uid was sampled again.

    Example:
        >>> count_refreshes("6ba7b810"), count_refreshes("6ba7b810.2")
        (0, 2)
    """
    return int(uid.partition(_ANEW)[2] or 0)


def name_anew(uid: str) -> str:
    """Build the uid under which a prompt is sampled again; it contains the count, so that a checkpoint keeps the count.

    Example:
        >>> name_anew("6ba7b810"), name_anew("6ba7b810.1")
        ('6ba7b810.1', '6ba7b810.2')
    """
    return f"{uid.partition(_ANEW)[0]}{_ANEW}{count_refreshes(uid) + 1}"
