"""The views of a batch that add-ons read.

``BatchView`` and ``PromptView`` have the same interface on verl's V1 (TransferQueue) and V0 (DataProto) trainers.
``Sessions`` has one entry per rollout. ``LossRows`` is a micro-batch in the worker's loss, for both engines and legacy
actors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_patches.legacy.handover import PREFIX

from ..batch import micro_batch as mb
from ..batch.padding import Layout, pad_column
from ..batch.plan import mini_batch_mean
from ..correction import Statistic
from ..proof.rewards import check_rewards


class BatchView(Protocol):
    """The ``n`` rows of one batch, without verl's padding rows; ``T`` is the longest response.

    Attributes:
        step: the trainer's step, from 1.
        keys: (n,) a unique name for each row.
        uids: (n,) the group of each row. With ``baseline=exclude``, rejected rows are removed from their groups before
            rewards are shaped.
        sessions: (n,) the rollout that produced each row; an agent loop may return several rows.
        is_padding: one flag per row of verl's batch; the view omits rows whose flag is True.
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
        """(n, T) float, the raw per-token scores, before any KL penalty is subtracted."""

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
        """Compute log-probs of responses with the trainer's forward pass over (prompt, response), at temperature 1.

        Accepts at most as many rows as the batch has. Before pi_old is computed in a synchronous step, the trainer's
        weights are those that sampled the rollouts.
        """

    def rows(self, *names: str) -> dict[str, Any]:
        """Read columns by verl's names: (n, T) right-padded per token, (n, ...) per row, or a list."""

    def put(self, **columns: Tensor) -> None:
        """Send columns named ``offpolicy_...``, (n, T) or (n,), to the workers' loss.

        Raises:
            ValueError: a column has another name or another number of rows.
        """


class PromptView(Protocol):
    """The prompts of a step, before responses are sampled."""

    step: int

    @property
    def uids(self) -> Sequence[str]: ...

    def rows(self, *names: str) -> dict[str, Any]:
        """Read columns of the data set, one value per prompt."""

    def put(self, **columns: Any) -> None:
        """Set columns, one value per prompt, such as verl's ``__rollout_n__`` on the V1 trainer."""


def last_outputs(batch: BatchView) -> list[int]:
    """Find the last row of each session, so that each session counts once."""
    return list({session: row for row, session in enumerate(batch.sessions)}.values())


def read_agent_fields(batch: BatchView, *names: str) -> list[Mapping[str, Any]]:
    """Read each row's ``extra_fields`` from the agent loop. V1 stores them in one column, V0 in a column per field."""
    with suppress(KeyError):
        return read_plain(batch, "extra_fields")
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
    """Check the names and lengths of columns that are sent to the workers.

    Raises:
        ValueError: a column's name lacks the prefix that legacy actors keep, or its number of rows is wrong.
    """
    for name, column in columns.items():
        if not name.startswith(PREFIX):
            raise ValueError(f"{name} would not reach every worker. Fix: name the column {PREFIX}{name}.")
        if len(column) != rows:
            raise ValueError(f"{name} has {len(column)} rows, but the batch has {rows} without padding.")


@dataclass(frozen=True)
class Sessions:
    """The S sessions of one batch.

    Attributes:
        of_row: (n,) int64, the session of each row.
        last: (S,) the last row of each session.
        uids: (S,) the group of each session.
        scores: (S,) float64, the raw score of each session's last row.
        tokens: (S,) float64, response tokens in all rows of each session, without tool tokens.
        truncated: (S,) bool, True if the session's last row has the maximum response length.
        silent: (S,) bool, True if ``baseline=exclude`` has rejected the session or all of its siblings.
    """

    of_row: Tensor
    last: Tensor
    uids: Sequence[str]
    scores: Tensor
    tokens: Tensor
    truncated: Tensor
    silent: Tensor

    def find_right(self, at_least: float) -> Tensor:
        """Find the sessions whose score is at least ``at_least``, (S,) bool."""
        return self.scores >= round_threshold(at_least)

    def groups(self, *, with_silent: bool = False) -> dict[str, list[int]]:
        """Collect the sessions of each group, leaving out silent sessions unless ``with_silent`` is set."""
        found: dict[str, list[int]] = {}
        for session, (uid, silent) in enumerate(zip(self.uids, self.silent.tolist(), strict=True)):
            if with_silent or not silent:
                found.setdefault(uid, []).append(session)
        return found


def read_sessions(batch: BatchView, most_tokens: int | None = None) -> Sessions:
    """Read the sessions of a batch.

    Args:
        most_tokens: maximum response length, including tool tokens; None: no response counts as truncated.

    Raises:
        RewardError: a row's score is not finite.
    """
    check_rewards(batch.scores, batch.uids, f"step {batch.step}")
    columns = batch.rows("response_mask", "responses")
    mask = columns["response_mask"].bool()
    names = list(batch.sessions)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_row = torch.tensor([numbers[name] for name in names], dtype=torch.int64)
    last = torch.zeros(len(numbers), dtype=torch.int64)
    last[of_row] = torch.arange(len(names))
    tokens = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, of_row, mask.sum(-1).double())
    silent = torch.zeros(len(names), dtype=torch.bool) if batch.silent is None else batch.silent.bool()
    ends = torch.tensor([len(response) for _, response in batch.token_ids]) if most_tokens else None
    uids = list(batch.uids)
    return Sessions(
        of_row=of_row,
        last=last,
        uids=[uids[row] for row in last.tolist()],
        scores=batch.scores.sum(-1)[last].double(),
        tokens=tokens,
        truncated=torch.zeros(len(numbers), dtype=torch.bool) if ends is None else ends[last] >= (most_tokens or 0),
        silent=silent[last],
    )


def round_threshold(at_least: float) -> float:
    """Round a threshold to float32, so that a float32 score of 0.9 is not below a threshold of 0.9.

    Example:
        >>> round_threshold(1.0), round_threshold(0.9) < 0.9
        (1.0, True)
    """
    return min(at_least, float(torch.tensor(at_least, dtype=torch.float32)))


def identify_prompts(batch: BatchView, sessions: Sessions) -> list[str]:
    """Compute an identifier of each session's prompt that is stable over steps; verl draws a new uid at each step.

    The identifier is a hash of the prompt's token ids in the session's first row.
    """
    first = {number: row for row, number in reversed(list(enumerate(sessions.of_row.tolist())))}
    ids = batch.token_ids
    return [
        hashlib.blake2b(",".join(map(str, ids[first[number]][0])).encode(), digest_size=16).hexdigest()
        for number in range(len(sessions.last))
    ]


class LossRows:
    """The B rows of one micro-batch; T is the length of the longest response.

    Args:
        model_output, data: arguments of the loss.
        with_padding: True to keep the padding rows that verl added, which have no response token.
        weigh: function that computes the correction's factor, (B, T), if the micro-batch does not contain it.
        actor_config: verl's config of the training actor; available for reports.
    """

    def __init__(
        self,
        model_output: Mapping[str, Any],
        data: TensorDict,
        *,
        with_padding: bool = True,
        weigh: Callable[[], Tensor] | None = None,
        actor_config: Any = None,
    ) -> None:
        self.actor_config = actor_config
        self._output, self._data, self._weigh = model_output, data, weigh
        self._layout = Layout.of(data) if "prompts" in data.keys() else None
        self._chosen: Tensor | None = None
        if not with_padding:
            self._chosen = self._dense("response_mask").bool().any(-1)

    @cached_property
    def log_prob(self) -> Tensor:
        """(B, T) log pi, zero on padding. Inside a loss, gradients flow through this tensor."""
        log_prob = mb.pad_log_probs(self._output, self._data, self._layout)
        return log_prob if self._chosen is None else log_prob[self._chosen]

    @cached_property
    def response_mask(self) -> Tensor:
        """(B, T) bool."""
        return self.column("response_mask").bool()

    @cached_property
    def weights(self) -> Tensor:
        """(B, T) weight * keep of the correction; all ones if there is no correction."""
        if mb.WEIGHTS in self._data.keys():
            return self.column(mb.WEIGHTS)
        if self._weigh is None:
            return torch.ones_like(self.response_mask, dtype=torch.float32)
        weights = self._weigh()
        return weights if self._chosen is None else weights[self._chosen]

    def __contains__(self, name: str) -> bool:
        return name in self._data.keys()

    def column(self, name: str) -> Tensor:
        """Read a column of the micro-batch: per token (B, T), zeros on padding; per row (B,).

        Raises:
            KeyError: the column did not arrive.
        """
        if name not in self._data.keys():
            raise KeyError(f"{name} is not in the micro-batch that reached the loss.")
        values = self._dense(name)
        return values if self._chosen is None else values[self._chosen]

    def mean(self, values: Tensor, actor_config: Any) -> Tensor:
        """Compute verl's mean of (B, T) values, divided by the denominators of the mini-batch over all ranks."""
        return mini_batch_mean(values, self.response_mask, actor_config, self._data)

    def _dense(self, name: str) -> Tensor:
        values: Tensor = self._data[name]
        return values if self._layout is None else pad_column(values, self._layout, name)
