"""Foreign routes, compared with experts and weights computed by hand; the gate's gradient, compared with finite
differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from recipe.offpolicy.replay.routed_model import RoutedModel, install_replay
from tests.support.mixtures import KINDS, build_mixture, draw_routes, draw_tokens

Block = Any
"""A mixture's block; hidden is (tokens, H), ids and weights are (tokens, k)."""


def weigh_softmax_first(block: Block, hidden: Tensor, ids: Tensor) -> Tensor:
    logits = hidden @ block.gate.weight.T
    chances = logits.exp() / logits.exp().sum(-1, keepdim=True)
    chosen = chances.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True)


def weigh_softmax_after(block: Block, hidden: Tensor, ids: Tensor) -> Tensor:
    logits = (hidden @ block.router.weight.T + block.router.bias).gather(-1, ids)
    return logits.exp() / logits.exp().sum(-1, keepdim=True)


def weigh_sigmoid(block: Block, hidden: Tensor, ids: Tensor) -> Tensor:
    """Bias and groups affect only the choice."""
    chosen = (1 / (1 + (-hidden @ block.gate.weight.T).exp())).gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * block.routed_scaling_factor


def run_expert(block: Block, expert: int, hidden: Tensor) -> Tensor:
    experts = block.experts
    gate, up = (experts.gate_up_proj[expert] @ hidden).chunk(2)
    return experts.down_proj[expert] @ (silu(gate) * up)


def run_clamped_expert(block: Block, expert: int, hidden: Tensor) -> Tensor:
    experts = block.experts
    both = hidden @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ experts.down_proj[expert] + experts.down_proj_bias[expert]


WEIGH: dict[str, Callable[[Block, Tensor, Tensor], Tensor]] = dict(
    zip(KINDS, (weigh_softmax_first, weigh_softmax_after, weigh_sigmoid), strict=True)
)
RUN: dict[str, Callable[[Block, int, Tensor], Tensor]] = dict(
    zip(KINDS, (run_expert, run_clamped_expert, run_expert), strict=True)
)


def build_exact(family: str) -> tuple[Any, RoutedModel, Tensor]:
    """A model in float64, and foreign routes that it replays."""
    model = build_mixture(family).double()
    model.config._experts_implementation = "eager"
    routed = install_replay(model)
    routes = draw_routes(dense=len(routed.layout.dense))
    routed.arm(routes)
    return model, routed, routes


@pytest.mark.parametrize("family", KINDS)
def test_foreign_routes_equal_a_reference(family: str) -> None:
    model, routed, routes = build_exact(family)
    met: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in routed.layout.layers:

        def keep(block: Block, inputs: Any, output: Any, layer: int = layer) -> None:
            met[layer] = (inputs[0].flatten(0, 1), (output[0] if isinstance(output, tuple) else output).flatten(0, 1))

        model.model.layers[layer].mlp.register_forward_hook(keep)
    with torch.no_grad():
        model(input_ids=draw_tokens(), use_cache=False)
        for layer, (hidden, found) in met.items():
            block, ids = model.model.layers[layer].mlp, routes[:, layer]
            weights = WEIGH[family](block, hidden, ids)
            expected = torch.stack(
                [
                    sum((w * RUN[family](block, e, h) for e, w in zip(row, weight, strict=True)), torch.zeros_like(h))
                    for row, weight, h in zip(ids.tolist(), weights, hidden, strict=True)
                ]
            )
            if hasattr(block, "shared_experts"):
                expected += block.shared_experts(hidden)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert tuple(met) == routed.layout.layers


@pytest.mark.parametrize("family", KINDS)
def test_the_gate_gradient_agrees_with_finite_differences(family: str) -> None:
    model, routed, _ = build_exact(family)
    labels = draw_tokens().roll(-1, 1)[..., None]

    def compute_loss() -> Tensor:
        return model(input_ids=draw_tokens(), use_cache=False).logits.log_softmax(-1).gather(-1, labels).sum()

    compute_loss().backward()
    for layer in routed.layout.layers:
        block = model.model.layers[layer].mlp
        weight = (block.router if hasattr(block, "router") else block.gate).weight
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(layer), dtype=weight.dtype)
        for direction in (weight.grad, drawn):
            step = 1e-3 * direction / direction.norm()
            with torch.no_grad():
                weight += step
                above = compute_loss()
                weight -= 2 * step
                below = compute_loss()
                weight += step
            slope = (weight.grad * step).sum()
            # Relative to the whole gradient's slope: a random direction has little of it.
            assert abs((above - below) / 2 - slope) <= 1e-3 * weight.grad.norm() * step.norm()
