"""The view of a batch that extensions read, identical on verl's V1 (TransferQueue) and V0 (DataProto) trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from verl_patches.legacy.handover import PREFIX

from ..correction import Statistic


class BatchView(Protocol):
    """The ``n`` rows of one batch, without verl's padding rows; ``T`` is the longest response.

    Attributes:
        step: the trainer's step, from 1.
        keys: (n,) a unique name for each row.
        uids: (n,) the group of each row. Under ``baseline=exclude``, rejected rows have left their groups before
            rewards are shaped.
        sessions: (n,) the rollout that produced each row; an agent loop may return several rows.
        is_padding: a flag for each row of verl's batch; the view omits rows with True.
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
        """(n, T) float, the raw per-token scores, before any KL."""

    @property
    def token_ids(self) -> Sequence[tuple[list[int], list[int]]]:
        """(n,) the ids of each row's prompt and response, without padding."""

    @property
    def silent(self) -> Tensor | None:
        """(n,) bool, rows whose advantage is 0 because of ``baseline=exclude``; None if there are no such rows."""

    def weigh(self) -> tuple[Tensor, Mapping[str, Statistic]]:
        """Compute the active correction's weight * keep (n, T) from mu and pi_old, and its statistics.

        Parts that need pi or advantages count as 1. Later calls return the first call's result.
        """

    def compute_log_probs(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Compute log-probs of responses with the trainer's own forward pass over (prompt, response), at temperature 1.

        Accepts at most as many rows as the batch has. Before pi_old is known, the forward pass uses the weights that
        sampled the rollouts of a synchronous step.
        """

    def rows(self, *names: str) -> dict[str, Any]:
        """Read columns by verl's names: per token (n, T), right-padded; per row (n, ...); other columns as lists."""

    def put(self, **columns: Tensor) -> None:
        """Send columns to the workers' loss, (n, T) or (n,), named ``offpolicy_...``.

        Raises:
            ValueError: a column has another name or another number of rows.
        """


class PromptView(Protocol):
    """Prompts before responses are sampled."""

    step: int

    @property
    def uids(self) -> Sequence[str]: ...

    def rows(self, *names: str) -> dict[str, Any]:
        """Read columns of the data set, one value per prompt."""

    def put(self, **columns: Any) -> None:
        """Set columns, one value per prompt, such as verl's ``__rollout_n__`` on the V1 trainer."""


def last_outputs(batch: BatchView) -> list[int]:
    """Find the last row of each session, so that a session counts once."""
    return list({session: row for row, session in enumerate(batch.sessions)}.values())


def read_agent_fields(batch: BatchView, *names: str) -> list[Mapping[str, Any]]:
    """Read what the agent loop returned in ``extra_fields`` for each row (V1: one column, V0: a column per field)."""
    try:
        return read_plain(batch, "extra_fields")
    except KeyError:
        columns = {}
        for name in names:
            with suppress(KeyError):
                columns[name] = read_plain(batch, name)
        return [{name: values[row] for name, values in columns.items()} for row in range(len(batch.uids))]


def read_plain(batch: BatchView, name: str) -> list[Any]:
    """Read a column that is not a tensor, one value per row; TransferQueue wraps each value.

    Raises:
        KeyError: the batch does not have this column.
    """
    found = batch.rows(name)[name]
    return [each.data if hasattr(each, "data") and not isinstance(each, Mapping | str) else each for each in found]


def check_columns(columns: Mapping[str, Tensor], rows: int) -> None:
    """Check names and lengths of columns for the workers.

    Raises:
        ValueError: the legacy actors would drop a column's name, or it has another number of rows.
    """
    for name, column in columns.items():
        if not name.startswith(PREFIX):
            raise ValueError(f"{name} would not reach every worker. Fix: name the column {PREFIX}{name}.")
        if len(column) != rows:
            raise ValueError(f"{name} has {len(column)} rows, but the batch has {rows} without padding.")
