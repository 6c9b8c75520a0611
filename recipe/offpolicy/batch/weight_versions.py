"""Versions of the weights that sampled each row, as verl's agent loop notes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction.row_layout import spread_over_tokens

EXTRA_FIELDS = "extra_fields"
"""Key of the rows' mappings in which verl's V1 trainer keeps them."""
VERSIONS = "offpolicy_versions"
"""Key of the (B, 2) int64 of the oldest and newest version by row, which the V0 trainer sends along."""


@dataclass(frozen=True)
class RowVersions:
    """Versions of the weights at each row's first and last token; see ``token_versions`` for those in between.

    Attributes:
        oldest, newest: (B,) int64, equal to the trainer's step after which these weights were synchronised.
    """

    oldest: Tensor
    newest: Tensor

    def by_token(self, like: Tensor) -> Tensor:
        """Compute the version that sampled each token, int64, in the layout and shape of ``like``.

        Raises:
            ValueError: a row was sampled by several versions.
        """
        if mixed := int((self.oldest != self.newest).sum()):
            raise ValueError(
                f"level=version: {mixed} rows were sampled by several versions of the weights, and nothing says which "
                f"token by which. Set level=turn or level=sequence."
            )
        return spread_over_tokens(self.oldest, like)

    def compute_ages(self, step: int, like: Tensor) -> Tensor:
        """Compute the ages in ``step`` on the device of ``like``, int64 >= 0: by row, (B,), from its oldest version."""
        # The weights at the start of step s are those of version s - 1.
        return (step - 1 - self.oldest).clamp(min=0).to(like.device)

    def find_unknown(self, response_mask: Tensor) -> Tensor:
        """Find rows, (B,) bool, of which some token's version is not known.

        Args:
            response_mask: (B, T) bool.
        """
        return (self.oldest != self.newest).to(response_mask.device) & response_mask.any(-1)


def read_row_versions(data: TensorDict) -> RowVersions | None:
    """Read the versions of the rows of a batch; None where verl does not record them."""
    if VERSIONS in data.keys():
        return RowVersions(*data[VERSIONS].unbind(-1))
    if EXTRA_FIELDS not in data.keys():
        return None
    spans = [(row.get("min_global_steps"), row.get("max_global_steps")) for row in read_extra_fields(data)]
    if any(None in span for span in spans):
        return None
    return RowVersions(*torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(-1))


def read_extra_fields(data: TensorDict) -> list[Mapping[str, Any]]:
    """Read what verl's agent loop says of each row; nothing where the batch does not hold it."""
    return [getattr(row, "data", row) for row in data[EXTRA_FIELDS]] if EXTRA_FIELDS in data.keys() else []


def compute_token_versions(versions: RowVersions | None, like: Tensor) -> Tensor:
    """Compute the version that sampled each token, int64, in the layout of ``like``: (B, T), or nested by row.

    Raises:
        ValueError: verl does not tell, or not by token.
    """
    if versions is None:
        raise ValueError(
            "level=version: verl does not say which version of the weights sampled these rows. Set level=sequence."
        )
    return versions.by_token(like)
