"""Replay in whole models with the three kinds of gate, compared with the same models without replay."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.replay.expert_choice import ReplayError
from recipe.offpolicy.replay.routed_model import RoutedModel, install_replay
from tests.support import mixtures
from tests.support.mixtures import (
    FAMILIES,
    KINDS,
    TOKENS,
    build_mixture,
    compute_gradients,
    draw_routes,
    draw_tokens,
    set_checkpointing,
)

Result = tuple[Tensor, dict[str, Tensor]]


@functools.cache
def built(family: str) -> tuple[Any, RoutedModel]:
    model = build_mixture(family)
    return model, install_replay(model)


OTHERS = [pytest.param(family, marks=pytest.mark.extended) for family in FAMILIES if family not in KINDS]


@pytest.fixture(params=[*KINDS, *OTHERS])
def pair(request: pytest.FixtureRequest) -> tuple[Any, RoutedModel]:
    """A model and its replay, which is off."""
    model, routed = built(request.param)
    routed.disarm()
    set_checkpointing(model, False)
    return model, routed


def own_routes(model: Any, routed: RoutedModel) -> Tensor:
    routed.record_own()
    compute_gradients(model)
    routed.disarm()
    return routed.stack_ids()


def foreign_routes(routed: RoutedModel) -> Tensor:
    return draw_routes(routed.layout.top_k, dense=len(routed.layout.dense))


def assert_equal(one: Result, other: Result) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_own_routes_change_nothing_to_the_bit(pair: tuple[Any, RoutedModel], checkpointing: bool) -> None:
    model, routed = pair
    native = compute_gradients(model)
    routes = own_routes(model, routed)
    set_checkpointing(model, checkpointing)
    routed.arm(routes)
    assert_equal(native, compute_gradients(model))
    for record in routed.get_records().values():
        assert (int(record.count_replayed()), int(record.count_equal())) == (TOKENS, TOKENS)


@pytest.mark.parametrize("too_early", ["disarm", "arm again"])
def test_other_routes_in_the_recomputation_are_refused(pair: tuple[Any, RoutedModel], too_early: str) -> None:
    model, routed = pair
    set_checkpointing(model, True)
    routes = foreign_routes(routed)
    routed.arm(routes)
    change = routed.disarm if too_early == "disarm" else functools.partial(routed.arm, routes.flip(0))
    last = routed.layout.layers[-1]
    with pytest.raises(ReplayError, match=f"layer {last} is recomputed for its backward with different routes from"):
        compute_gradients(model, before_backward=change)


def test_routes_that_do_not_fit_are_refused_and_leave_it_unarmed(pair: tuple[Any, RoutedModel]) -> None:
    model, routed = pair
    native = compute_gradients(model)
    routes = foreign_routes(routed)
    wrong = routes.clone()
    wrong[7, 2, 0] = mixtures.EXPERTS
    twice = routes.clone()
    twice[3, 1] = 5
    for given, reason in [
        (wrong, r"layer 2 name experts \[8, .* in row 7, but [a-z0-9_]+ has experts 0 to 7"),
        (twice, r"layer 1 name experts \[5, 5\] in row 3"),
        (routes[:, :2], "3 decoder layers"),
    ]:
        routed.arm(routes)
        with pytest.raises(ReplayError, match=reason):
            routed.arm(given)
        assert_equal(native, compute_gradients(model))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [*KINDS, *OTHERS])
def test_what_enters_the_experts_is_counted_there(family: str, checkpointing: bool) -> None:
    model = build_mixture(family)
    set_checkpointing(model, checkpointing)
    routed = install_replay(model)
    layers = len(routed.layout.layers)
    routed.watch_gradients(True)
    routed.arm(draw_routes(dense=len(routed.layout.dense)), torch.arange(TOKENS) < 20)
    _, gradients = compute_gradients(model)
    gates = [
        each for name, each in gradients.items() if each.shape == (8, 32) and ("gate." in name or "router" in name)
    ]
    assert len(gates) == layers
    assert all(gate.any() for gate in gates)
    counts = routed.count_entered()
    assert counts[:, :2].tolist() == [[20, 20]] * layers
    assert all(0 < value < float("inf") for value in routed.get_gradients())
    routed.watch_gradients(False)
    assert routed.get_gradients() == []


def test_other_ids_than_those_shipped_are_counted_where_they_enter() -> None:
    """Code between the router and its experts changes the ids of three tokens in one layer."""
    model = build_mixture("Qwen3Moe")
    routed = install_replay(model)
    routes = draw_routes()

    def change(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[1].clone()
        ids[:3] = ids[:3].flip(-1)
        return args[0], ids, *args[2:]

    model.model.layers[1].mlp.experts.register_forward_pre_hook(change, prepend=True)
    routed.arm(routes)
    model(input_ids=draw_tokens(), use_cache=False)
    assert routed.count_entered()[:, 1].tolist() == [TOKENS, TOKENS - 3, TOKENS]
