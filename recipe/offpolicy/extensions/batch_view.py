"""A training batch as extensions see it: the same on verl's V1 trainer (TransferQueue) and V0 trainer (DataProto)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from verl_patches.legacy.handover import PREFIX


class BatchView(Protocol):
    """The rows of one batch without those that verl adds as padding; ``n`` rows, ``T`` the longest response.

    Attributes:
        step: the trainer's step, from 1.
        keys: (n,) a name of each row that no other has.
        uids: (n,) the group of each row. Under ``baseline=exclude`` rejected rows have left their groups by the time
            that rewards are shaped.
        sessions: (n,) the rollout that each row is an output of; an agent loop may return several.
        is_padding: of all rows that verl holds; the view leaves out those that are.
    """

    step: int

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def uids(self) -> Sequence[str]: ...

    @property
    def sessions(self) -> Sequence[str]: ...

    @property
    def is_padding(self) -> Sequence[bool]: ...

    @property
    def scores(self) -> Tensor:
        """(n, T) float, the raw scores by token, before any KL."""

    @property
    def token_ids(self) -> Sequence[tuple[list[int], list[int]]]:
        """(n,) the ids of each row's prompt and response, without padding."""

    @property
    def silent(self) -> Tensor | None:
        """(n,) bool, rows whose advantage is 0 as ``baseline=exclude`` says; None: none."""

    def compute_log_probs(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Compute log-probs of responses by the trainer's own forward pass over (prompt, response), at temperature 1.

        A pass over as many rows as the batch has; before pi_old is known, it is by the weights that rollouts of a
        synchronous step are sampled by.
        """

    def rows(self, *names: str) -> dict[str, Any]:
        """Read columns by verl's names: by token (n, T), filled up at the end; by row (n, ...); others as lists."""

    def put(self, **columns: Tensor) -> None:
        """Send columns to the workers' loss, (n, T) or (n,), named ``offpolicy_...``.

        Raises:
            ValueError: of another name, or another number of rows.
        """


class PromptView(Protocol):
    """Prompts that are about to be sampled."""

    step: int

    @property
    def uids(self) -> Sequence[str]: ...

    def rows(self, *names: str) -> dict[str, Any]:
        """Read columns of the data set, a value for each prompt."""

    def put(self, **columns: Any) -> None:
        """Set columns, a value for each prompt, such as verl's ``__rollout_n__`` on the V1 trainer."""


def last_outputs(batch: BatchView) -> list[int]:
    """Find the last row of each session, so that a session counts once."""
    return list({session: row for row, session in enumerate(batch.sessions)}.values())


def check_columns(columns: Mapping[str, Tensor], rows: int) -> None:
    """Check names and lengths of what is to travel to the workers.

    Raises:
        ValueError: a name that the legacy actors would drop, or another number of rows.
    """
    for name, column in columns.items():
        if not name.startswith(PREFIX):
            raise ValueError(f"{name} would not reach every worker. Fix: name the column {PREFIX}{name}.")
        if len(column) != rows:
            raise ValueError(f"{name} has {len(column)} rows and the batch {rows}, padding left out.")
