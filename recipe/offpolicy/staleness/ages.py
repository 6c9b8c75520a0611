"""Ages of the rows of a batch, in versions of the weights, from the tags that verl's agent loop gives them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..batch.weight_versions import NEWEST_VERSION, OLDEST_VERSION
from .rate_limit import format_eta

ISSUED = "global_steps"
"""Tag of a row and of its prompt: the step in which the prompt was issued."""


class StalenessError(RuntimeError):
    """A row is older than ``offpolicy.staleness.eta`` allows, or its age is unknown."""


class AgeLimit:
    """Largest age at which a row is trained: eta of the step in which its prompt was issued, rounded up.

    Args:
        eta: eta of the run's first step.
    """

    def __init__(self, eta: Fraction) -> None:
        self._changes = [(0, eta)]
        self._resumed, self._restored = 0, 0.0

    @property
    def eta(self) -> Fraction:
        """In force."""
        return self._changes[-1][1]

    @property
    def oldest(self) -> int:
        """Largest age in versions, for prompts issued now."""
        return math.ceil(self.eta)

    def change(self, step: int, eta: Fraction) -> None:
        """Use another eta from ``step`` on."""
        self._changes.append((step, eta))

    def get_eta(self, issued: int) -> Fraction:
        """Return eta of the step in which a prompt was issued."""
        return next(eta for step, eta in reversed(self._changes) if step <= issued)

    def get_oldest(self, issued: int) -> float:
        """Return the largest age of rows whose prompts were issued in this step."""
        oldest = math.ceil(self.get_eta(issued))
        return oldest if issued > self._resumed else max(oldest, self._restored)

    def admits(self, version: int, issued: int, step: int) -> bool:
        """Return True if a row sampled by ``version`` is not too old in ``step``, starting with version step - 1."""
        return compute_age(version, step) <= self.get_oldest(issued)

    def state(self) -> list[list[Any]]:
        """Return the steps at which eta changed, with its values, as plain values for a checkpoint."""
        return [[step, str(eta)] for step, eta in self._changes]

    def restore(self, step: int, eta: str | None, changes: Sequence[Sequence[Any]] = ()) -> None:
        """Resume after ``step`` steps of a run.

        Args:
            eta: eta of that run; None if unknown.
            changes: its ``state``, if eta moved.
        """
        now = self.eta
        if changes:
            before = [(int(since), Fraction(each)) for since, each in changes]
            steps = [since for since, _ in before]
            if steps[0] != 0 or steps != sorted(steps) or steps[-1] > step + 1:
                raise ValueError(f"changes={list(changes)}: their steps must rise from 0 to at most {step + 1}")
            self._changes = [*before, (step + 1, now)]
            return
        self._resumed = step
        self._restored = math.inf if eta is None else math.ceil(float(eta))


@dataclass(frozen=True)
class RowTag:
    """Versions, issue step and length of a row, from the tag that verl gives it.

    Attributes:
        key: uid of the prompt, session and number of the output.
        version, newest: versions of the weights that sampled its first and its last token.
        issued: step in which its prompt was issued.
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
                f"sequence {key} does not name the version of the weights that sampled it, so its age is unknown. Fix: "
                f"pass on the extra_fields of the server's output in its agent loop, or set "
                f"offpolicy.staleness.eta=null."
            )
        newest, padding = tag.get(NEWEST_VERSION), bool(tag.get("is_padding", False))
        rows.append(
            RowTag(key, version, version if newest is None else newest, tag[ISSUED], tag["response_len"], padding)
        )
    return rows


def check_newest(tags: Mapping[str, Mapping[str, Any]], step: int, eta: str) -> None:
    """Check that no finished row names weights that do not exist yet.

    Args:
        tags: tags of rows, by key, before ``step`` has made its weights.

    Raises:
        StalenessError: a rollout server reports a newer version than it samples with.
    """
    for key, tag in tags.items():
        if (newest := tag.get(NEWEST_VERSION)) is not None and newest > step - 1:
            raise StalenessError(
                f"sequence {key} finished in step {step} and reports that version {newest} of the weights sampled it, "
                f"but version {step - 1} is the newest (offpolicy.staleness.eta={eta}): its rollout server reports "
                f"another version than it samples with, so no age can be known."
            )


def find_too_old(rows: Sequence[RowTag], step: int, limit: AgeLimit) -> list[int]:
    """Find the positions of rows that are too old in ``step``."""
    return [i for i, row in enumerate(rows) if not (row.is_padding or limit.admits(row.version, row.issued, step))]


def check_ages(rows: Sequence[RowTag], step: int, limit: AgeLimit) -> None:
    """Check that no row is too old.

    Raises:
        StalenessError: names the oldest row.
    """
    if not (found := find_too_old(rows, step, limit)):
        return
    worst = min((rows[i] for i in found), key=lambda row: row.version)
    raise StalenessError(
        f"sequence {worst.key} was sampled by version {worst.version} of the weights and would be trained in step "
        f"{step}, by version {step - 1}, at age {compute_age(worst.version, step)}, but offpolicy.staleness.eta="
        f"{format_eta(limit.get_eta(worst.issued))}, in force when its prompt was issued in step {worst.issued}, "
        f"allows {limit.get_oldest(worst.issued):g}. {len(found)} of {len(rows)} sequences are too old: some code "
        f"issues prompts, or returns sequences, past the limit."
    )


def check_seen(seen: float | None, entered: Sequence[RowTag], step: int, eta: str) -> None:
    """Check that the loss saw no row older than the rows that entered it.

    Args:
        seen: age of the oldest row in the loss, by the versions sent with the rows; None: it saw none.
        entered: rows that have a token in the loss.

    Raises:
        StalenessError: the loss saw an older row, or no versions.
    """
    oldest = min(entered, key=lambda row: row.version)
    if seen is None or seen > compute_age(oldest.version, step):
        found = "no versions" if seen is None else f"a sequence of age {seen:g}"
        raise StalenessError(
            f"the loss of step {step} saw {found}, but the oldest sequence that entered it, {oldest.key}, has age "
            f"{compute_age(oldest.version, step)} by its tag (offpolicy.staleness.eta={eta}): the versions in "
            f"extra_fields differ from those of the tags."
        )


def split_too_old(too_old: Collection[int], rows: Sequence[RowTag], mini_batch: Sequence[int]) -> tuple[set[int], ...]:
    """Split rows that are too old into those that can be masked, and those whose advantage must be zeroed instead.

    A mini-batch without tokens would divide by zero.

    Args:
        mini_batch: mini-batch of each row.
    """
    old = set(too_old)
    left = {mini_batch[i] for i, row in enumerate(rows) if i not in old and not row.is_padding and row.length}
    masked = {i for i in old if mini_batch[i] in left}
    return masked, old - masked
