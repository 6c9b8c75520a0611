"""Notes of routes: what is kept of each turn, and the checksum."""

from __future__ import annotations

import torch

from recipe.offpolicy.replay.batch_routes import RouteNote, count_shared, hash_routes, hash_tokens
from tests.support.mixtures import draw_routes


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


def test_a_rows_checksum_is_the_sum_of_its_tokens() -> None:
    routes = draw_routes(tokens=7)
    assert int(hash_tokens(routes, torch.arange(7)).sum()) == hash_routes(routes)
    assert hash_routes(routes[:0]) == 0
