"""Own and foreign routes in the other families of transformers."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.replay.routed_model import install_replay
from tests.support.mixtures import (
    FAMILIES,
    KINDS,
    LAYERS,
    build_mixture,
    compute_gradients,
    draw_routes,
    set_checkpointing,
)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in KINDS])
def test_routes_of_a_family(family: str, checkpointing: bool) -> None:
    model = build_mixture(family)
    native, gradients = compute_gradients(model)
    routed = install_replay(model)
    dense = len(routed.layout.dense)
    assert routed.layout.layers == tuple(range(dense, LAYERS))
    routed.record_own()
    compute_gradients(model)
    own = routed.stack_ids()
    set_checkpointing(model, checkpointing)

    routed.arm(own)
    same, same_gradients = compute_gradients(model)
    assert torch.equal(same, native)
    assert all(torch.equal(gradient, same_gradients[name]) for name, gradient in gradients.items())

    routes = draw_routes(routed.layout.top_k, dense)
    routed.arm(routes)
    moved, moved_gradients = compute_gradients(model)
    assert torch.equal(routed.stack_ids(), routes)
    assert (moved - native).abs().max() > 0.1
    gates = [name for name in moved_gradients if is_gate(name, moved_gradients[name].shape)]
    assert len(gates) == LAYERS - dense
    assert all(moved_gradients[name].any() for name in gates)


def is_gate(name: str, shape: torch.Size) -> bool:
    return shape == (8, 32) and any(word in name for word in ("gate.", "router"))
