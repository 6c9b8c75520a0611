"""Versions of the weights that sampled each row, as verl's agent loop notes them."""

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
"""Key of the rows' mappings in which verl's V1 trainer keeps them."""
OLDEST_VERSION, NEWEST_VERSION = "min_global_steps", "max_global_steps"
"""Keys of these mappings and of a row's tags: the versions of the weights that sampled its first token and its last."""
VERSION = "global_steps"
"""Key of the version that a rollout server says with its answer."""
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

    def check_ages(self, spec: CorrectionSpec) -> None:
        """Check that the ages which parts of ``spec`` go by are known.

        Raises:
            ValueError: a row was sampled by several versions, and a part goes by less than the row.
        """
        parts = {key: part for key, part in spec.age_parts.items() if part.level != "sequence"}
        by_token = spec.alpha == BY_AGE
        mixed = int((self.oldest != self.newest).sum()) if parts or by_token else 0
        if mixed and by_token:
            raise ValueError(
                f"correction.alpha=by_age: {mixed} rows were sampled by several versions of the weights, and nothing "
                f"says which token by which. Set correction.alpha=0.5 for example."
            )
        for key, part in parts.items() if mixed else ():
            at, value = (
                ("level", part.level) if part.by_staleness is None else ("by_staleness", list(part.by_staleness))
            )
            other = "" if part.by_staleness is None else f", or correction.{key}.by_staleness=null"
            raise ValueError(
                f"correction.{key}.{at}={format_value(value)}: {mixed} rows were sampled by several versions of the "
                f"weights, and nothing says which token by which, as where the client or the agent loop is your own. "
                f"Set correction.{key}.level=sequence, by which a row is as old as its first token{other}."
            )

    def find_unknown(self, response_mask: Tensor) -> Tensor:
        """Find rows, (B,) bool, of which some token's version is not known.

        Args:
            response_mask: (B, T) bool.
        """
        return (self.oldest != self.newest).to(response_mask.device) & response_mask.any(-1)


def read_row_versions(data: TensorDict, extra_fields: Sequence[Mapping[str, Any]]) -> RowVersions | None:
    """Read the versions of the rows of a batch; None where verl does not record them.

    Args:
        extra_fields: of ``read_extra_fields``; empty where the batch has none.
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
    """Read what verl's agent loop says of each row; nothing where the batch does not hold it."""
    return [getattr(row, "data", row) for row in data[EXTRA_FIELDS]] if EXTRA_FIELDS in data.keys() else []


def check_ages_known(spec: CorrectionSpec, versions: RowVersions | None, step: int | None) -> None:
    """Check that the ages which parts of ``spec`` go by are known; nothing where none does.

    Raises:
        ValueError: verl does not tell, or not by token where a part needs that; or the trainer's step did not come.
    """
    if not spec.age_keys:
        return
    if versions is None or step is None:
        key = spec.age_keys[0]
        lacking = "the trainer's step" if step is None else "the version of the weights that sampled each row"
        raise ValueError(f"correction.{key} goes by the age of the weights, and {lacking} did not come with the batch.")
    versions.check_ages(spec)


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
