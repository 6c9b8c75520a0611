"""Routes of a micro-batch: three rows of 3, 2 and 4 tokens, packed and padded; and their notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.batch.weight_versions import CHUNKS, UNKNOWN, read_extra_fields
from recipe.offpolicy.replay.batch_routes import (
    NOTE,
    ROUTES,
    RouteNote,
    TokenLayout,
    check_checksums,
    count_shared,
    hash_routes,
    hash_routes_by_row,
    hash_tokens,
    read_routes,
)
from recipe.offpolicy.replay.expert_choice import ReplayError
from tests.support.mixtures import LAYERS, TOP_K, draw_routes

LENGTHS = [3, 2, 4]
STEP = 7


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(versions: tuple[int, ...] = (6, 6, 6), counts: tuple[int, ...] = (2, 1, 3)) -> TensorDict:
    """Routes of all tokens except each row's last token; the response is the last token of each row."""
    rows = [draw_routes(tokens=length, seed=length) for length in LENGTHS]
    for row in rows:
        row[-1] = 0
    fields = [
        {NOTE: [count, hash_routes(row[:count])], "min_global_steps": version}
        for row, count, version in zip(rows, counts, versions, strict=True)
    ]
    columns = {
        "input_ids": nested([torch.arange(length) for length in LENGTHS]),
        "response_mask": nested([torch.ones(1, dtype=torch.int64) for _ in LENGTHS]),
        ROUTES: nested([row.to(torch.int16) for row in rows]),
        "extra_fields": NonTensorStack(*fields),
    }
    return TensorDict(columns, batch_size=3)


def layout(data: TensorDict, forwarded: torch.Tensor) -> TokenLayout:
    return TokenLayout.of(data["input_ids"], forwarded)


PACKED = torch.zeros(1, 9)
FILLED_UP = torch.zeros(1, 12)
PADDED = torch.zeros(3, 4)
PLACES = {"packed": list(range(9)), "filled up": list(range(9)), "padded": [0, 1, 2, 4, 5, 8, 9, 10, 11]}
FORWARDS = {"packed": PACKED, "filled up": FILLED_UP, "padded": PADDED}


@pytest.mark.parametrize("name", FORWARDS)
def test_routes_are_laid_out_as_the_tokens_are(name: str) -> None:
    data = batch()
    where = layout(data, FORWARDS[name])
    found = read_routes(data, where, "R3", STEP, None)
    assert where.places.tolist() == PLACES[name]
    assert found.routes.shape == (FORWARDS[name].numel(), LAYERS, TOP_K)
    assert torch.equal(where.collect(found.routes), data[ROUTES].values())
    assert where.collect(found.replayed).tolist() == [True, True, False, True, False, True, True, True, False]
    # What fills the forward up has no routes.
    assert int(found.replayed.sum()) == 6
    assert found.size == 9 * LAYERS * TOP_K * 2


def test_rows_that_are_too_old_are_withheld() -> None:
    """In step 7, version 6 is 0 versions old, and version 4 is two versions old."""
    data = batch(versions=(6, 4, 5))
    where = layout(data, PACKED)
    found = read_routes(data, where, "R3", STEP, 1)
    assert found.ages is not None
    assert found.ages.tolist() == [0, 0, 0, 2, 2, 1, 1, 1, 1]
    assert found.replayed.tolist() == [True, True, False, False, False, True, True, True, False]
    assert int(found.withheld) == 1


def test_a_row_is_as_old_as_its_oldest_token() -> None:
    """Chunks are recorded: the second row's first attempt, with version 4, sampled nothing."""
    data = batch(versions=(6, 4, 4))
    noted = ([[(6, 1)]], [[(6, 1)]], [[(5, 2)], [(6, 1)]])
    fields = [{**row, CHUNKS: chunks} for row, chunks in zip(read_extra_fields(data), noted, strict=True)]
    data["extra_fields"] = NonTensorStack(*fields)
    found = read_routes(data, layout(data, PACKED), "R3", STEP, 1)
    assert found.ages is not None
    assert found.ages.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert int(found.withheld) == 0
    # A chunk of which no one knows: verl's own version of the row.
    fields[1] = {**fields[1], CHUNKS: [[(6, 1), (UNKNOWN, 1)]]}
    data["extra_fields"] = NonTensorStack(*fields)
    assert int(read_routes(data, layout(data, PACKED), "R3", STEP, 1).withheld) == 1


def changed(**columns: Any) -> TensorDict:
    data = batch()
    for name, values in columns.items():
        data[name] = values
    return data


def test_routes_that_do_not_fit_are_refused() -> None:
    where = layout(batch(), PACKED)
    with pytest.raises(ReplayError, match="no routed_experts: the rollout engine returned no routes"):
        read_routes(batch().exclude(ROUTES), where, "R3", STEP, None)
    with pytest.raises(ReplayError, match="the forward pass of pi_old recorded no routes"):
        read_routes(batch().exclude(ROUTES), where, "R2", STEP, None)
    fields = NonTensorStack({NOTE: [2, 0]}, {}, {})
    with pytest.raises(ReplayError, match="2 sequences have no note of the routes"):
        read_routes(changed(extra_fields=fields), where, "R3", STEP, None)
    short = nested([draw_routes(tokens=length) for length in (3, 3, 3)])
    with pytest.raises(ReplayError, match=r"cover \[3, 3, 3\] tokens per sequence, but the sequences have \[3, 2, 4\]"):
        read_routes(changed(**{ROUTES: short}), where, "R3", STEP, None)
    with pytest.raises(ReplayError, match=r"offpolicy.replay.oldest=1 .* sampled one sequence is missing"):
        read_routes(batch(versions=(6, None, 6)), where, "R3", STEP, 1)  # type: ignore[arg-type]


def test_routes_that_a_worker_recorded_come_with_a_hash_of_each_row() -> None:
    data = batch()
    rows = data[ROUTES].unbind()
    sealed = hash_routes_by_row(nested(rows))
    assert sealed.tolist() == [int(hash_tokens(row, torch.arange(len(row))).sum()) for row in rows]
    data["offpolicy_seal_routed_experts"] = sealed
    assert check_checksums(data, layout(data, PACKED)) == len(rows)
    data[ROUTES] = nested([row.flip(0) for row in rows])
    with pytest.raises(ReplayError, match="these routes are not those with which the sequences were sampled"):
        check_checksums(data, layout(data, PACKED))


def test_checksums_show_routes_of_another_row() -> None:
    data = batch()
    where = layout(data, PACKED)
    assert check_checksums(data, where) == 3
    rows = list(data[ROUTES].unbind())
    rows[2] = rows[2].roll(1, 0)
    with pytest.raises(ReplayError, match=r"1 of 3 sequences differ, so these routes .* position 2"):
        check_checksums(changed(**{ROUTES: nested(rows)}), where)


def test_routes_of_tokens_that_a_turn_renders_anew_are_its_own() -> None:
    note, first, second = RouteNote(), draw_routes(tokens=3, seed=1), draw_routes(tokens=4, seed=2)
    note.keep_sampled([5, 6, 7, 8], first)
    assert torch.equal(note.keep_sampled([5, 99, 7, 8, 9], second), torch.cat([first[:1], second[1:]]))
    assert count_shared([5, 6], [5, 99, 7], 2) == 1


def test_the_checksum_differs_by_id_layer_order_and_place() -> None:
    routes = draw_routes(tokens=7)
    changed = routes.clone()
    changed[3, 1, 0] = (changed[3, 1, 0] + 1) % 8
    others = [changed, routes.roll(1, 0), routes.flip(1), routes.flip(2), routes[:-1], routes * 0]
    assert len({hash_routes(each) for each in (routes, *others)}) == 7
