"""A padded view of a micro-batch in the worker's loss, for extensions; it reads engine and legacy-actor layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch import micro_batch as mb
from ..batch.padding import Layout, pad_column
from ..batch.plan import mini_batch_mean


class LossRows:
    """The B rows of one micro-batch; T is the length of the longest response.

    Args:
        model_output, data: arguments of the loss.
        with_padding: True to keep the padding rows that verl added, which have no response token.
        weigh: computes the correction's factor, (B, T), if the micro-batch does not contain it.
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
        """(B, T) log pi, zeros on padding; inside a loss, gradients flow through it."""
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
        """Compute verl's mean of (B, T) values, with the denominators of the mini-batch over all ranks."""
        return mini_batch_mean(values, self.response_mask, actor_config, self._data)

    def _dense(self, name: str) -> Tensor:
        values: Tensor = self._data[name]
        return values if self._layout is None else pad_column(values, self._layout, name)
