"""Cost of a step beyond verl's own work: forward passes for pi_old, and bytes sent to the workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class StepCost:
    """Counts of the costs of one step, in the trainer's process."""

    def __init__(self) -> None:
        self._of_pi_old = False
        self.begin()

    def begin(self) -> None:
        """Reset the counts."""
        self._forwards = 0
        self._bytes = 0

    def counted(self, compute_log_prob: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the worker group's ``compute_log_prob`` to count the calls made within ``of_pi_old``.

        verl also calls this method for the reference policy's log-probs if the reference is the actor without its
        adapter.
        """

        def counting(*args: Any, **kwargs: Any) -> Any:
            self._forwards += self._of_pi_old
            return compute_log_prob(*args, **kwargs)

        return counting

    @contextmanager
    def of_pi_old(self) -> Iterator[None]:
        """Count the forward passes for log pi_old within the context."""
        self._of_pi_old = True
        try:
            yield
        finally:
            self._of_pi_old = False

    def add(self, columns: Mapping[str, Tensor], handed: object) -> None:
        """Add the data that one update sends in addition to verl's own batch.

        Args:
            columns: columns of all rows, dense or nested; each row is sent to one rank.
            handed: object that is copied to each rank; its pickled size is counted only once.
        """
        self.add_columns(columns)
        self._bytes += len(pickle.dumps(handed))

    def add_columns(self, columns: Mapping[str, Tensor]) -> None:
        """Count additional columns that are sent for all rows."""
        self._bytes += sum(count_bytes(column) for column in columns.values())

    def metrics(self) -> dict[str, float]:
        """Return the metrics under their logged names."""
        counts = {"proximal_forwards": self._forwards, "added_bytes": self._bytes}
        return {f"offpolicy/cost/{name}": float(count) for name, count in counts.items()}


def count_bytes(column: Tensor) -> int:
    """Compute the bytes of a column's values, plus its offsets if it is nested."""
    if column.is_nested:
        nested: Any = column  # torch's stubs do not declare offsets
        return count_bytes(nested.values()) + count_bytes(nested.offsets())
    return column.numel() * column.element_size()
