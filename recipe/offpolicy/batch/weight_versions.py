"""Versions of the weights that sampled each row, as verl's agent loop records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction import CorrectionSpec
from ..correction.problem import format_value
from ..correction.proximal import BY_AGE
from ..correction.row_layout import spread_over_tokens

EXTRA_FIELDS = "extra_fields"
"""Key of the per-row mappings in which verl's V1 trainer stores them."""
OLDEST_VERSION, NEWEST_VERSION = "min_global_steps", "max_global_steps"
"""Keys of these mappings and of a row's tags: versions of the weights that sampled its first and its last token."""
VERSION = "global_steps"
"""Key of the version that a rollout server returns with its answer."""
VERSIONS = "offpolicy_versions"
"""Key of the (B, 2) int64 oldest and newest version per row, which the V0 trainer sends."""


@dataclass(frozen=True)
class RowVersions:
    """Versions of the weights at each row's first and last token; see ``token_versions`` for the tokens in between.

    Attributes:
        oldest, newest: (B,) int64, the trainer's step after which these weights were synchronised.
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
                f"level=version: {mixed} sequences were sampled by several versions of the weights, and the version of "
                f"each token is unknown. Set level=turn or level=sequence."
            )
        return spread_over_tokens(self.oldest, like)

    def column_to_seal(self, like: Tensor) -> Tensor:
        """Compute all that a loss reads from the versions of a row, per token in the layout of ``like``, int64.

        The version of the token; where it is unknown, -1 minus the oldest version of the row.
        """
        return spread_over_tokens(torch.where(self.oldest == self.newest, self.oldest, -1 - self.oldest), like)

    def compute_ages(self, step: int, like: Tensor) -> Tensor:
        """Compute the ages in ``step`` on the device of ``like``, int64 >= 0: (B,), from each row's oldest version."""
        # The weights at the start of step s are those of version s - 1.
        return (step - 1 - self.oldest).clamp(min=0).to(like.device)

    def check_ages(self, spec: CorrectionSpec) -> None:
        """Check that the ages needed by parts of ``spec`` are known.

        Raises:
            ValueError: a row was sampled by several versions, and a part needs a finer age than the row's.
        """
        parts = {key: part for key, part in spec.age_parts.items() if part.level != "sequence"}
        by_token = spec.alpha == BY_AGE
        mixed = int((self.oldest != self.newest).sum()) if parts or by_token else 0
        if mixed and by_token:
            raise ValueError(
                f"correction.alpha=by_age: {mixed} sequences were sampled by several versions of the weights, and the "
                f"version of each token is unknown. Set correction.alpha=0.5 for example."
            )
        for key, part in parts.items() if mixed else ():
            at, value = (
                ("level", part.level) if part.by_staleness is None else ("by_staleness", list(part.by_staleness))
            )
            other = "" if part.by_staleness is None else f", or correction.{key}.by_staleness=null"
            raise ValueError(
                f"correction.{key}.{at}={format_value(value)}: {mixed} sequences were sampled by several versions of "
                f"the weights, and the version of each token is unknown, for example because the client or the agent "
                f"loop is your own. Set correction.{key}.level=sequence, which uses the age of the first token{other}."
            )

    def find_unknown(self, response_mask: Tensor) -> Tensor:
        """Find rows, (B,) bool, with a token of unknown version.

        Args:
            response_mask: (B, T) bool.
        """
        return (self.oldest != self.newest).to(response_mask.device) & response_mask.any(-1)


def read_row_versions(data: TensorDict, extra_fields: Sequence[Mapping[str, Any]]) -> RowVersions | None:
    """Read the versions of the rows of a batch; None if verl does not record them.

    Args:
        extra_fields: result of ``read_extra_fields``; empty if the batch has none.
    """
    if VERSIONS in data.keys():
        return RowVersions(*data[VERSIONS].unbind(-1))
    if EXTRA_FIELDS not in data.keys():
        return None
    spans = [(row.get(OLDEST_VERSION), row.get(NEWEST_VERSION)) for row in extra_fields]
    if any(None in span for span in spans):
        return None
    return RowVersions(*torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(-1))


def read_extra_fields(data: TensorDict) -> list[Mapping[str, Any]]:
    """Read the agent loop's fields of each row; empty if the batch does not have them."""
    return [getattr(row, "data", row) for row in data[EXTRA_FIELDS]] if EXTRA_FIELDS in data.keys() else []


def check_ages_known(spec: CorrectionSpec, versions: RowVersions | None, step: int | None) -> None:
    """Check that the ages needed by parts of ``spec`` are known; accepts a spec that needs none.

    Raises:
        ValueError: verl does not record the versions, or not per token although a part needs that; or the trainer's
            step is missing.
    """
    if not spec.age_keys:
        return
    if versions is None or step is None:
        key = spec.age_keys[0]
        lacking = "the trainer's step" if step is None else "the version of the weights that sampled each row"
        raise ValueError(f"correction.{key} depends on the age of the weights, but the batch lacks {lacking}.")
    versions.check_ages(spec)


def compute_token_versions(versions: RowVersions | None, like: Tensor) -> Tensor:
    """Compute the version that sampled each token, int64, in the layout of ``like``: (B, T), or nested by row.

    Raises:
        ValueError: verl does not record the versions, or not per token.
    """
    if versions is None:
        raise ValueError(
            "level=version: verl does not record the version of the weights that sampled a token. Set level=sequence."
        )
    return versions.by_token(like)
