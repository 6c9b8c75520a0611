"""Faults between the trainer and the loss: what happens to each column that the loss reads, and to the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.batch.weight_versions import CHUNKS, read_extra_fields

Change = Callable[[torch.Tensor], torch.Tensor]
Turns = list[list[tuple[int, int]]]


def _at(place: int, change: Change) -> Change:
    """Change one token, or one row of a column by row."""

    def changed(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[place] = change(values[place])
        return values

    return changed


OF_NUMBERS: dict[str, Change] = {
    "doubled": lambda values: 2 * values,
    "rounded to bfloat16": lambda values: values.bfloat16().to(values.dtype),
    "values of other tokens": lambda values: values.roll(1, 0),
    "values of other rows": lambda values: values.flip(0),
    "one token changed by one ulp": _at(0, lambda value: torch.nextafter(value, torch.full_like(value, 9.0))),
    "one non-finite token": _at(0, lambda value: torch.full_like(value, torch.nan)),
}
OF_IDS: dict[str, Change] = {
    "ids of other rows": lambda values: values.flip(0),
    "ids of other tokens": lambda values: values.roll(1, 0),
    "one token changed": _at(0, lambda value: value + 1),
}
OF_THE_MASK: dict[str, Change] = {"one token missing": _at(0, torch.zeros_like), "all tokens valid": torch.ones_like}
OF_ROWS: dict[str, Change] = {
    "all ones": torch.ones_like,
    "doubled": lambda values: 2 * values,
    "one row changed": _at(0, lambda value: value + 1),
}
COLUMNS: dict[str, dict[str, Change]] = {
    "rollout_log_probs": OF_NUMBERS,
    "old_log_probs": OF_NUMBERS,
    "advantages": OF_NUMBERS,
    "ref_log_prob": OF_NUMBERS,
    "responses": OF_IDS,
    "response_mask": OF_THE_MASK,
    "input_ids": OF_IDS
    | {"one token changed": _at(-1, lambda value: value - 1), "a prompt token changed": _at(0, torch.zeros_like)},
    "position_ids": OF_IDS | {"shifted by one": lambda values: values + 1},
    "loss_mask": OF_THE_MASK | {"all zeros": torch.zeros_like, "doubled": lambda values: 2 * values},
    "offpolicy_scale": OF_ROWS,
    "offpolicy_mini_batch_tokens": OF_ROWS,
}
LOST = ("rollout_log_probs", "old_log_probs", "advantages", "ref_log_prob", "offpolicy_scale", "extra_fields")
VERSIONS: dict[str, Callable[[list[int]], list[int]]] = {
    "newer by one": lambda versions: [version + 1 for version in versions],
    "all equal": lambda versions: [versions[0]] * len(versions),
    "versions of other rows": lambda versions: versions[1:] + versions[:1],
}
VERSIONS_OF_TOKENS = "versions per token"
OF_CHUNKS: dict[str, Callable[[list[Turns]], list[Turns]]] = {
    "a longer chunk": lambda rows: [[[(3, 2), (4, other - 1)]] for (((_, _), (_, other)),) in rows],
    "versions of other rows": lambda rows: rows[1:] + rows[:1],
    "swapped within a row": lambda rows: [[[(4, one), (3, other)]] for (((_, one), (_, other)),) in rows],
}
"""What happens to the chunks of rows whose first token version 3 sampled, and version 4 the others."""
PLANS: dict[str, dict[str, Any]] = {
    "plan of another step": {"step": 9},
    "other bounds": {"bounds": {"masks.gsm": {"upper": 9.0}}},
    "fewer hashes": {"sealed": ("plan",)},
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: the column, or the plan.
        how: what happens to it.
        act: changes the batch on its way to the loss.
    """

    what: str
    how: str
    act: Callable[[TensorDict], None]


def _change(name: str, change: Change) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        column = data[name]
        if column.is_nested:
            values = change(column.values())
            data[name] = torch.nested.nested_tensor_from_jagged(values, column.offsets())
        else:
            data[name] = change(column)

    return act


def _lose(name: str) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        del data[name]

    return act


def _renumber(change: Callable[[list[int]], list[int]]) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        versions = change([row["min_global_steps"] for row in read_extra_fields(data)])
        data["extra_fields"] = NonTensorStack(*({"min_global_steps": v, "max_global_steps": v} for v in versions))

    return act


def _rechunk(change: Callable[[list[Turns]], list[Turns]]) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        fields = read_extra_fields(data)
        changed = change([row[CHUNKS] for row in fields])
        data["extra_fields"] = NonTensorStack(
            *({**row, CHUNKS: turns} for row, turns in zip(fields, changed, strict=True))
        )

    return act


def _replan(**changes: Any) -> Callable[[TensorDict], None]:
    def act(data: TensorDict) -> None:
        from recipe.offpolicy.batch.plan import PLAN
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(data, **{PLAN: replace(tu.get_non_tensor_data(data, PLAN, None), **changes)})

    return act


def faults() -> Iterator[Fault]:
    """All of them, column by column."""
    for name, changes in COLUMNS.items():
        for how, change in changes.items():
            yield Fault(name, how, _change(name, change))
    for how, renumber in VERSIONS.items():
        yield Fault("versions", how, _renumber(renumber))
    for how, rechunk in OF_CHUNKS.items():
        yield Fault(VERSIONS_OF_TOKENS, how, _rechunk(rechunk))
    for name in LOST:
        yield Fault(name, "missing", _lose(name))
    for name in ("old_log_probs", "advantages", "plan"):
        yield Fault(f"hash of {name}", "missing", _lose(f"offpolicy_seal_{name}"))
        yield Fault(
            f"hash of {name}", "hashes of other rows", _change(f"offpolicy_seal_{name}", lambda s: s.roll(1, 0) + 1)
        )
    for how, changes in PLANS.items():
        yield Fault("plan", how, _replan(**changes))
