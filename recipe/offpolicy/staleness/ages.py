"""Ages of the rows of a batch, in versions of the weights, and the limit on how many prompts may be issued.

Let B be the number of prompts per batch, N the number of prompts issued so far, and i the version of the trainer's
weights. AReaL's limit (arXiv: 2505.24298) is floor((N - 1) / B) <= i + eta: the last prompt is used for training by
weights at most eta versions newer than the weights when it was issued. Here, step s begins with the weights of version
s - 1, and the limit is N <= (s + eta) * B, which is equivalent for whole numbers. A fractional eta allows a
corresponding fraction of another batch, so the largest age is eta rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch.weight_versions import CHUNKS, NEWEST_VERSION, OLDEST_VERSION, UNKNOWN, Chunk, read_extra_fields


class RateLimitError(RuntimeError):
    """More prompts were issued than the limit allows."""


class RateLimit:
    """Counts the issued prompts that have been used for training, or can still be used.

    Args:
        eta: number of batches by which sampling may run ahead of training, >= 0; a float is converted from its decimal
            text.
        batch: number of prompts per batch.

    Attributes:
        account: number of issued prompts, excluding those that were dropped before training.
    """

    def __init__(self, eta: float, batch: int) -> None:
        # eta is converted from its text, so that 0.1 means 1/10 and not the nearest binary float.
        self.eta, self.batch, self.account = Fraction(str(eta)), batch, 0

    def room(self, step: int) -> int:
        """Compute how many prompts may be issued in ``step``, counted from 1; negative if too many have been issued."""
        return math.floor((step + self.eta) * self.batch) - self.account

    def issued(self, count: int, step: int) -> None:
        """Add prompts that were issued in ``step``.

        Raises:
            RateLimitError: the number of prompts exceeds the limit.
        """
        if count > (room := self.room(step)):
            raise RateLimitError(
                f"{count} prompts were issued in step {step}, but offpolicy.staleness.eta={format_eta(self.eta)} "
                f"allows {max(room, 0)} more prompts. Fix: find the code that issues prompts beyond the limit."
            )
        self.account += count

    def left(self, count: int) -> None:
        """Subtract prompts that will never be trained on: failed, filtered, evicted or lost."""
        self.account -= count

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {"eta": format_eta(self.eta), "account": self.account}

    def restore(self, step: int, waiting: int) -> None:
        """Resume after ``step`` completed steps, with ``waiting`` prompts restored from a checkpoint.

        The checkpoint's own count is not used, because the batch size may differ and prompts may be missing.
        """
        self.account = step * self.batch + waiting


def format_eta(eta: Fraction) -> str:
    """Format eta in Hydra's syntax: '2', '0.5'."""
    return f"{float(eta):g}"


ISSUED = "global_steps"
"""Tag of rows and prompts: the step in which the prompt was issued."""


class StalenessError(RuntimeError):
    """A row is older than ``offpolicy.staleness.eta`` allows, or its age is unknown."""


class AgeLimit:
    """Largest age at which a row may be used: eta of the step in which the row's prompt was issued, rounded up.

    Args:
        eta: eta of the run's first step.
    """

    def __init__(self, eta: Fraction) -> None:
        self._changes = [(0, eta)]
        self._resumed, self._restored = 0, 0.0

    @property
    def eta(self) -> Fraction:
        """The current eta."""
        return self._changes[-1][1]

    @property
    def oldest(self) -> int:
        """Largest age, in versions, of rows whose prompts are issued now."""
        return math.ceil(self.eta)

    def change(self, step: int, eta: Fraction) -> None:
        """Change eta from ``step`` onwards."""
        self._changes.append((step, eta))

    def get_eta(self, issued: int) -> Fraction:
        """Return eta of the step in which a prompt was issued."""
        return next(eta for step, eta in reversed(self._changes) if step <= issued)

    def get_oldest(self, issued: int) -> float:
        """Return the largest age of rows whose prompts were issued in this step."""
        oldest = math.ceil(self.get_eta(issued))
        return oldest if issued > self._resumed else max(oldest, self._restored)

    def admits(self, version: int, issued: int, step: int) -> bool:
        """Return True if a row that ``version`` of the weights sampled is not too old in ``step``."""
        return compute_age(version, step) <= self.get_oldest(issued)

    def state(self) -> list[list[Any]]:
        """Return the steps at which eta changed, and the new values of eta, as plain values for a checkpoint."""
        return [[step, str(eta)] for step, eta in self._changes]

    def restore(self, step: int, eta: str | None, changes: Sequence[Sequence[Any]] = ()) -> None:
        """Resume after ``step`` steps of a run.

        Args:
            eta: eta of the run before the checkpoint; None if unknown.
            changes: ``state`` of the run before the checkpoint, if eta changed.
        """
        now = self.eta
        if changes:
            before = [(int(since), Fraction(each)) for since, each in changes]
            steps = [since for since, _ in before]
            if steps[0] != 0 or steps != sorted(steps) or steps[-1] > step + 1:
                raise ValueError(f"changes={list(changes)}: the steps must increase from 0 to at most {step + 1}")
            self._changes = [*before, (step + 1, now)]
            return
        self._resumed = step
        self._restored = math.inf if eta is None else math.ceil(float(eta))


@dataclass(frozen=True)
class RowTag:
    """Weight versions, issue step and length of a row, read from the tag that verl attaches to the row.

    Attributes:
        key: uid of the prompt, number of the session, and number of the output.
        version, newest: versions of the weights that sampled the row's first token and last token.
        issued: step in which the row's prompt was issued.
        length: number of response tokens.
        is_padding: True for a padding row of the batch.
    """

    key: str
    version: int
    newest: int
    issued: int
    length: int
    is_padding: bool


def compute_age(version: int, step: int) -> int:
    """Compute the age of a row in ``step``, which begins with the weights of version step - 1."""
    return step - 1 - version


def read_tags(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> list[RowTag]:
    """Read the tags of a batch.

    Raises:
        StalenessError: a row has no version because its agent loop drops verl's extra_fields.
    """
    rows = []
    for key, tag in zip(keys, tags, strict=True):
        if (version := tag.get(OLDEST_VERSION)) is None:
            raise StalenessError(
                f"sequence {key} does not contain the version of the weights that sampled it, so its age is unknown. "
                "Fix: pass on the extra_fields of the server's output in its agent loop, or set "
                "offpolicy.staleness.eta=null."
            )
        newest = version if (found := tag.get(NEWEST_VERSION)) is None else found
        rows.append(RowTag(key, version, newest, tag[ISSUED], tag["response_len"], bool(tag.get("is_padding"))))
    return rows


def check_newest(tags: Mapping[str, Mapping[str, Any]], step: int, eta: str) -> None:
    """Check that no finished row reports a version of the weights that does not exist yet.

    Args:
        tags: key -> tag of each row, read before the weights of ``step`` exist.

    Raises:
        StalenessError: a rollout server reports a newer version than the version with which it samples.
    """
    for key, tag in tags.items():
        if (newest := tag.get(NEWEST_VERSION)) is not None and newest > step - 1:
            raise StalenessError(
                f"sequence {key} finished in step {step} and reports that version {newest} of the weights sampled it, "
                f"but version {step - 1} is the newest (offpolicy.staleness.eta={eta}): its rollout server reports a "
                "version other than the version with which it samples, so all ages are unknown."
            )


def find_too_old(rows: Sequence[RowTag], step: int, limit: AgeLimit) -> list[int]:
    """Find the positions of rows that are too old in ``step``."""
    return [i for i, row in enumerate(rows) if not (row.is_padding or limit.admits(row.version, row.issued, step))]


def check_ages(rows: Sequence[RowTag], step: int, limit: AgeLimit) -> None:
    """Check that no row is too old.

    Raises:
        StalenessError: a row is too old; the message names the oldest row.
    """
    if not (found := find_too_old(rows, step, limit)):
        return
    worst = min((rows[i] for i in found), key=lambda row: row.version)
    raise StalenessError(
        f"sequence {worst.key} is too old: it was sampled by version {worst.version} of the weights, so in step "
        f"{step}, which starts from version {step - 1}, its age is {compute_age(worst.version, step)}. The largest "
        f"allowed age is {limit.get_oldest(worst.issued):g}, because offpolicy.staleness.eta was "
        f"{format_eta(limit.get_eta(worst.issued))} when its prompt was issued in step {worst.issued}. {len(found)} of "
        f"{len(rows)} sequences are too old. Fix: find the code that issues prompts too early or returns sequences "
        "too late."
    )


def check_seen(seen: float | None, entered: Sequence[RowTag], step: int, eta: str) -> None:
    """Check that no row in the loss is older than the rows that were sent to the loss.

    Args:
        seen: age of the oldest row in the loss, computed from the versions sent with the rows; None if the loss
            received no versions.
        entered: rows of which at least one token is in the loss.

    Raises:
        StalenessError: the loss received a row older than all of these rows, or it received no versions.
    """
    oldest = min(entered, key=lambda row: row.version)
    if seen is None or seen > compute_age(oldest.version, step):
        found = "no versions" if seen is None else f"a sequence of age {seen:g}"
        raise StalenessError(
            f"the loss of step {step} received {found}, but the oldest sequence that entered it, {oldest.key}, has "
            f"age {compute_age(oldest.version, step)} according to its tag (offpolicy.staleness.eta={eta}): the "
            "versions in extra_fields differ from those in the tags."
        )


def split_too_old(too_old: Collection[int], rows: Sequence[RowTag], mini_batch: Sequence[int]) -> tuple[set[int], ...]:
    """Split rows that are too old into rows to mask and rows whose advantage must be set to zero instead.

    If all rows of a mini-batch were masked, its loss would be divided by zero tokens.

    Args:
        mini_batch: index of the mini-batch of each row.
    """
    old = set(too_old)
    left = {mini_batch[i] for i, row in enumerate(rows) if i not in old and not row.is_padding and row.length}
    masked = {i for i in old if mini_batch[i] in left}
    return masked, old - masked


RESPONSE_MASK = "response_mask"
"""Column from which the runs of tokens are read; turns are read from ``EXTRA_FIELDS``."""


Turns = Sequence[Sequence[Chunk]]
"""The chunks of each request, for one row."""


def list_turns(data: TensorDict) -> list[Turns | None]:
    """List the turns of each row; None for a row without recorded turns."""
    return [fields.get(CHUNKS) for fields in read_extra_fields(data)]


def check_noted(
    rows: Sequence[RowTag], turns: Sequence[Turns | None], runs: Sequence[Sequence[int]], step: int, eta: str
) -> None:
    """Check that each token has a version, and that no version is older than the weights when the prompt was issued.

    A prompt issued in step s, or restored from a checkpoint, is sampled by version s - 1 or newer.

    Args:
        turns: turns of each row.
        runs: lengths of the runs of each row's response mask.

    Raises:
        StalenessError: a client lost a chunk, or a rollout server reports an older version than the version with which
            it samples.
    """
    for row, noted, lengths in zip(rows, turns, runs, strict=True):
        if row.is_padding:
            continue
        if noted is not None and (lost := count_lost(noted, lengths)):
            raise StalenessError(
                f"sequence {row.key} of step {step} has {row.length} tokens, but the version of the weights that "
                f"sampled {lost} of them was not recorded (offpolicy.staleness.eta={eta}, chunks "
                f"{[list(turn) for turn in noted]}): the client of the rollout servers has lost a chunk, or the "
                f"agent loop puts answers to several requests into one turn. Fix: use one request id per sequence in "
                f"the agent loop, or set offpolicy.staleness.eta=null."
            )
        oldest = min([version for turn in noted or () for version, _ in turn], default=row.version)
        if oldest < row.issued - 1:
            raise StalenessError(
                f"sequence {row.key} of step {step} reports that version {oldest} of the weights sampled it, but its "
                f"prompt was issued in step {row.issued}, under version {row.issued - 1} "
                f"(offpolicy.staleness.eta={eta}): its rollout server reports a version other than the version with "
                "which it samples, or has not loaded these weights."
            )


def count_versions(turns: Turns) -> int:
    """Count the different versions of the weights that sampled a row.

    Example:
        >>> count_versions([[(3, 2), (4, 5)], [(4, 1), (6, 1)]])
        3
    """
    return len({version for turn in turns for version, _ in turn})


def count_lost(turns: Turns, runs: Sequence[int]) -> int:
    """Count a row's tokens that have no recorded version.

    Runs may be shorter than their turns if verl has truncated them. If there are fewer turns than runs, the agent loop
    uses a new request id per turn; turns cannot be assigned to such rows, and none of their tokens counts as lost.

    Example:
        >>> count_lost([[(3, 2), (4, 5)]], [7]), count_lost([[(3, 2)]], [7]), count_lost([[(3, 2)]], [2, 5])
        (0, 5, 0)
    """
    unknown = sum(tokens for turn in turns for version, tokens in turn if version == UNKNOWN)
    if unknown or len(turns) != len(runs):
        return unknown
    named = (sum(tokens for _, tokens in turn) for turn in turns)
    return sum(max(run - tokens, 0) for run, tokens in zip(runs, named, strict=True))


def list_runs(response_mask: Tensor) -> list[list[int]]:
    """List the lengths of the runs of each row's mask, (B, T) or nested by row.

    Example:
        >>> list_runs(torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]]))
        [[2, 1], []]
    """
    rows = response_mask.unbind()
    # The 0 after each row separates the row's last run from the first run of the next row.
    flat = torch.cat([torch.cat([row.bool(), row.new_zeros(1, dtype=torch.bool)]) for row in rows])
    before = torch.cat([flat.new_zeros(1), flat[:-1]])
    starts, ends = (flat & ~before).nonzero()[:, 0], (before & ~flat).nonzero()[:, 0]
    bounds = torch.tensor([len(row) + 1 for row in rows]).cumsum(0)
    counts = torch.bincount(torch.searchsorted(bounds, starts, right=True), minlength=len(rows)).tolist()
    return [part.tolist() for part in (ends - starts).split(counts)]
