"""Replay in whole models of the three kinds of gate, against the same models without it."""

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
    KINDS,
    TOKENS,
    WIDTH,
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


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, RoutedModel]:
    """A model and its replay, off."""
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


def test_foreign_routes_act_and_survive_checkpointing(pair: tuple[Any, RoutedModel]) -> None:
    model, routed = pair
    native = compute_gradients(model)
    routes = foreign_routes(routed)
    routed.arm(routes)
    plain = compute_gradients(model)
    assert torch.equal(routed.stack_ids(), routes)
    assert (plain[0] - native[0]).abs().max() > 0.1
    gates = [f"model.layers.{layer}.mlp" for layer in routed.layout.layers]
    assert all(
        any(name.startswith((f"{gate}.gate.", f"{gate}.router.")) and grad.any() for name, grad in plain[1].items())
        for gate in gates
    )
    set_checkpointing(model, True)
    assert_equal(plain, compute_gradients(model))
    # The recomputation does not count twice.
    assert all(int(record.count_replayed()) == TOKENS for record in routed.get_records().values())


@pytest.mark.parametrize("too_early", ["disarm", "arm again"])
def test_other_routes_in_the_recomputation_are_refused(pair: tuple[Any, RoutedModel], too_early: str) -> None:
    model, routed = pair
    set_checkpointing(model, True)
    routes = foreign_routes(routed)
    routed.arm(routes)
    change = routed.disarm if too_early == "disarm" else functools.partial(routed.arm, routes.flip(0))
    last = routed.layout.layers[-1]
    with pytest.raises(ReplayError, match=f"layer {last} is recomputed for its backward with other routes"):
        compute_gradients(model, before_backward=change)


def test_unarmed_nothing_changes(pair: tuple[Any, RoutedModel]) -> None:
    model, _ = pair
    family = type(model).__name__.removesuffix("ForCausalLM")
    assert_equal(compute_gradients(build_mixture(family)), compute_gradients(model))


def test_rows_without_routes_are_native_to_the_bit(pair: tuple[Any, RoutedModel]) -> None:
    model, routed = pair
    native = compute_gradients(model)
    routed.arm(torch.zeros_like(foreign_routes(routed)))
    assert_equal(native, compute_gradients(model))
    assert not any(record.replayed.any() for record in routed.get_records().values())


def test_rows_beside_replayed_ones_are_native_to_the_bit(pair: tuple[Any, RoutedModel]) -> None:
    """The first row of the batch has no routes, and does not see the other.

    What it sends to the experts is native to the bit. What comes back is not: a matrix product rounds by how many rows
    go through an expert together.
    """
    model, routed = pair
    sent: list[tuple[Tensor, ...]] = []
    first = model.model.layers[routed.layout.layers[0]].mlp.experts
    hook = first.register_forward_pre_hook(lambda _, inputs: sent.append(tuple(each[:WIDTH] for each in inputs)))
    native, _ = compute_gradients(model)
    routes = foreign_routes(routed)
    routes[:WIDTH] = 0
    routed.arm(routes)
    replayed, _ = compute_gradients(model)
    hook.remove()
    assert len(sent[0]) == 3
    assert all(torch.equal(one, other) for one, other in zip(*sent, strict=True))
    torch.testing.assert_close(replayed[0], native[0], rtol=0, atol=1e-4)
    assert (replayed[1] - native[1]).abs().max() > 0.1
    for layer, record in routed.get_records().items():
        assert record.replayed.tolist() == [False] * WIDTH + [True] * WIDTH
        assert torch.equal(record.ids[:WIDTH], record.own[:WIDTH])
        assert torch.equal(record.ids[WIDTH:], routes[WIDTH:, layer])


def test_one_expert_a_token_has_rows_without_routes_too() -> None:
    model = build_mixture("Qwen3Moe", num_experts_per_tok=1, norm_topk_prob=False)
    routed = install_replay(model)
    native = compute_gradients(model)
    zeros = torch.zeros(TOKENS, mixtures.LAYERS, 1, dtype=torch.uint8)
    routed.arm(zeros)
    assert_equal(native, compute_gradients(model))
    # Rows that are named are replayed.
    routed.arm(zeros, torch.ones(TOKENS, dtype=torch.bool))
    assert not torch.equal(native[0], compute_gradients(model)[0])
    assert not routed.stack_ids().any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_dtypes_give_the_same(pair: tuple[Any, RoutedModel], dtype: torch.dtype) -> None:
    model, routed = pair
    routes = foreign_routes(routed)
    routed.arm(routes)
    expected = compute_gradients(model)
    routed.arm(routes.to(dtype))
    assert_equal(expected, compute_gradients(model))


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


def test_permuted_layers_of_a_model_with_a_dense_one_are_refused() -> None:
    _, routed = built("DeepseekV3")
    with pytest.raises(ReplayError, match=r"layer 1 name experts \[0, 0\] in row 0, an expert twice"):
        routed.arm(draw_routes(dense=1)[:, [1, 0, 2]])


def test_routes_of_another_forward_are_refused() -> None:
    model, routed = built("Qwen3Moe")
    routed.arm(draw_routes(tokens=TOKENS - 1))
    with pytest.raises(ReplayError, match="layer 0 routes 24 tokens, but routes of 23 tokens were given"):
        compute_gradients(model)


def test_records_are_those_since_the_arming() -> None:
    model, routed = built("Qwen3Moe")
    routed.record_own()
    with pytest.raises(ReplayError, match=r"layer\(s\) \[0, 1, 2\] of qwen3_moe have chosen no experts"):
        routed.get_records()
    compute_gradients(model)
    routed.disarm()
    assert list(routed.get_records()) == [0, 1, 2]


def test_it_adds_no_weights() -> None:
    model = build_mixture("Qwen3Moe")
    weights = list(model.state_dict())
    install_replay(model)
    assert list(model.state_dict()) == weights


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_what_enters_the_experts_is_counted_there(family: str, checkpointing: bool) -> None:
    model = build_mixture(family)
    set_checkpointing(model, checkpointing)
    routed = install_replay(model)
    layers = len(routed.layout.layers)
    routed.watch_gradients(True)
    routed.arm(draw_routes(dense=len(routed.layout.dense)), torch.arange(TOKENS) < 20)
    compute_gradients(model)
    counts = routed.count_entered()
    assert counts[:, :2].tolist() == [[20, 20]] * layers
    assert all(0 < value < float("inf") for value in routed.get_gradients())
    routed.watch_gradients(False)
    assert routed.get_gradients() == []


def test_other_ids_than_those_shipped_are_counted_where_they_enter() -> None:
    """Somebody between the router and its experts changes the ids of three tokens in one layer."""
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
