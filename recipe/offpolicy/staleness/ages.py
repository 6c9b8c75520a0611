"""Ages of the rows of a batch, in versions of the weights, from the tags that verl's agent loop gives them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OLDEST_VERSION, NEWEST_VERSION = "min_global_steps", "max_global_steps"
"""Tags of a row: the versions of the weights that sampled its first token and its last."""
ISSUED = "global_steps"
"""Tag of a row and of its prompt: the step in which the prompt was issued."""


class StalenessError(RuntimeError):
    """A row is older than ``offpolicy.staleness.eta`` admits, or nobody knows how old it is."""


@dataclass
class AgeLimit:
    """The greatest age at which a row is trained.

    Attributes:
        oldest: versions.
        resumed: step of the checkpoint that the run began with.
        restored: versions, of rows that this checkpoint brought back; infinite where it does not tell.
    """

    oldest: int
    resumed: int = 0
    restored: float = 0

    def admits(self, version: int, step: int) -> bool:
        """Return True if a row that ``version`` sampled is not too old in ``step``, which begins with step - 1."""
        return compute_age(version, step) <= self.get_oldest(version)

    def get_oldest(self, version: int) -> float:
        """Return the greatest age of rows that ``version`` sampled."""
        return self.oldest if version >= self.resumed else max(self.oldest, self.restored)

    def restore(self, step: int, eta: str | None) -> None:
        """Begin after ``step`` steps of a run whose eta was this; None where that is not known."""
        self.resumed = step
        self.restored = math.inf if eta is None else math.ceil(float(eta))


@dataclass(frozen=True)
class RowTag:
    """What verl's tag of a row says of it.

    Attributes:
        key: uid of the prompt, session and number of the output.
        version: of the weights that sampled its first token.
        issued: step in which its prompt was issued.
        length: response tokens.
        is_padding: it fills up the batch.
    """

    key: str
    version: int
    issued: int
    length: int
    is_padding: bool


def compute_age(version: int, step: int) -> int:
    """Compute the age of a row in ``step``, which begins with the weights of version step - 1."""
    return step - 1 - version


def read_tags(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> list[RowTag]:
    """Read the tags of a batch.

    Raises:
        StalenessError: a row has no version: its agent loop drops verl's extra_fields.
    """
    rows = []
    for key, tag in zip(keys, tags, strict=True):
        if (version := tag.get(OLDEST_VERSION)) is None:
            raise StalenessError(
                f"row {key} does not say which version of the weights sampled it, so that its age is not known. Fix: "
                f"let its agent loop hand on the extra_fields of the server's output, or set "
                f"offpolicy.staleness.eta=null."
            )
        rows.append(RowTag(key, version, tag[ISSUED], tag["response_len"], bool(tag.get("is_padding", False))))
    return rows


def check_newest(tags: Mapping[str, Mapping[str, Any]], step: int, eta: str) -> None:
    """Check that no finished row names weights that do not exist yet.

    Args:
        tags: of rows, by key, as they stand before ``step`` has made its weights.

    Raises:
        StalenessError: a rollout server tells a newer version than it samples by.
    """
    for key, tag in tags.items():
        if (newest := tag.get(NEWEST_VERSION)) is not None and newest > step - 1:
            raise StalenessError(
                f"row {key} was found finished in step {step}, and says that version {newest} of the weights sampled "
                f"it, of which version {step - 1} is the newest (offpolicy.staleness.eta={eta}): its rollout server "
                f"tells another version than it samples by, so that no age can be known."
            )


def find_too_old(rows: Sequence[RowTag], step: int, limit: AgeLimit) -> list[int]:
    """Find the places of rows that are too old in ``step``."""
    return [i for i, row in enumerate(rows) if not (row.is_padding or limit.admits(row.version, step))]


def check_ages(rows: Sequence[RowTag], step: int, limit: AgeLimit, eta: str) -> None:
    """Check that no row is too old.

    Raises:
        StalenessError: names the oldest row.
    """
    if not (found := find_too_old(rows, step, limit)):
        return
    worst = min((rows[i] for i in found), key=lambda row: row.version)
    raise StalenessError(
        f"row {worst.key} was sampled by version {worst.version} of the weights and would be trained in step {step}, "
        f"by version {step - 1}: {compute_age(worst.version, step)} versions old, and offpolicy.staleness.eta={eta} "
        f"admits {limit.get_oldest(worst.version):g}. {len(found)} of {len(rows)} rows are too old: something issues "
        f"prompts, or hands out rows, past the limit."
    )


def check_seen(seen: float | None, entered: Sequence[RowTag], step: int, eta: str) -> None:
    """Check that the loss saw no row older than those that entered it.

    Args:
        seen: age of the oldest row in the loss, by the versions that travel with the rows; None: it saw none.
        entered: rows that have a token in the loss.

    Raises:
        StalenessError
    """
    oldest = min(entered, key=lambda row: row.version)
    if seen is None or seen > compute_age(oldest.version, step):
        found = "no versions" if seen is None else f"a row that is {seen:g} versions old"
        raise StalenessError(
            f"the loss of step {step} saw {found}, and the oldest row that entered it, {oldest.key}, is "
            f"{compute_age(oldest.version, step)} versions old by its tag (offpolicy.staleness.eta={eta}): the "
            f"versions in extra_fields are not those of the tags."
        )


def split_too_old(too_old: Collection[int], rows: Sequence[RowTag], mini_batch: Sequence[int]) -> tuple[set[int], ...]:
    """Split rows that are too old into those that can be masked, and those whose advantage has to be zeroed instead.

    A mini-batch of which no token is left would divide by zero.

    Args:
        mini_batch: of each row.
    """
    left = {mini_batch[i] for i, row in enumerate(rows) if i not in too_old and not row.is_padding and row.length}
    masked = {i for i in too_old if mini_batch[i] in left}
    return masked, set(too_old) - masked
