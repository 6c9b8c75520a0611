"""Checks, by the routers' own choices, that routes belong to the rows and layers in which they are replayed.

With equal inputs, a router usually chooses the same experts as another engine did for the token (98 % of choices at
equal weights). If it agrees better with the routes of another row or layer, the routes are misplaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .expert_choice import ChoiceRecord, ReplayError, equal_sets

_DEVIATIONS = 3.0
"""Number of standard deviations by which one count of agreements must exceed another."""


def compare_layers(records: Mapping[int, ChoiceRecord]) -> Tensor:
    """Count the replayed rows in which each layer's own choice equals the routes shipped for each layer.

    Args:
        records: records of one forward, by layer.

    Returns:
        (layers, layers) int64, the choosing layer first, in the order of the records.
    """
    return torch.stack([_count(chooser.own, list(records.values()), chooser.replayed) for chooser in records.values()])


def _count(own: Tensor, shipped: list[ChoiceRecord], rows: Tensor) -> Tensor:
    return torch.stack([(equal_sets(own, record.ids) & rows).sum() for record in shipped])


def check_layer_order(records: Mapping[int, ChoiceRecord]) -> None:
    """Check that no layer chooses what was shipped for another one.

    Args:
        records: records of one replayed forward, by layer.

    Raises:
        ReplayError: names the first such layer and the layer whose routes it agrees with.
    """
    layers = list(records)
    for place, counts in enumerate(compare_layers(records).tolist()):
        other = max(range(len(counts)), key=lambda each: counts[each])
        if _exceeds(counts[other], counts[place]):
            rows = int(records[layers[place]].count_replayed())
            raise ReplayError(
                f"layer {layers[place]} chooses the experts that were shipped for layer {layers[other]} in "
                f"{counts[other]} of {rows} rows, and its own in {counts[place]}: the layers of the routes are "
                f"not in the model's order. Fix: give routes by absolute layer number."
            )


def check_row_order(records: Mapping[int, ChoiceRecord]) -> None:
    """Check that routers do not choose what was shipped for the previous or next row.

    Args:
        records: records of one replayed forward, by layer.

    Raises:
        ReplayError: names the shift.
    """
    own = sum(int(record.count_equal()) for record in records.values())
    for shift, where in ((1, "after"), (-1, "before")):
        shifted = sum(_count_shifted(record, shift) for record in records.values())
        if _exceeds(shifted, own):
            rows = sum(int(record.count_replayed()) for record in records.values())
            raise ReplayError(
                f"routers choose the experts that were shipped for the row {where} in {shifted} of {rows} choices, and "
                f"those of their own row in {own}: the routes are off by one row. Fix: give each row the routes of the "
                f"token that enters the model there, not of the token that it predicts."
            )


def _count_shifted(record: ChoiceRecord, shift: int) -> int:
    """Count the rows whose own choice was shipped ``shift`` rows later, where both rows are replayed."""
    ids, rows = record.ids.roll(-shift, 0), record.replayed & record.replayed.roll(-shift, 0)
    # A row that wraps around the end is not a neighbour.
    rows[-1 if shift > 0 else 0] = False
    return int((equal_sets(record.own, ids) & rows).sum())


def _exceeds(other: int, own: int) -> bool:
    return other - own > _DEVIATIONS * math.sqrt(other + own)
