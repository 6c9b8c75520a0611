"""Measures routing replay: forward and backward passes of a mixture of experts, with its own and with recorded routes.

    python scripts/benchmark/routing_replay.py [--hidden 128] [--experts 8] [--top-k 2] [--layers 4] [--tokens 2048]
        [--pairs 12]

Weights are random, in float32 on a CPU with one thread. With replay, the pass gives the routers the recorded routes,
which includes a check of the ids, and copies the counts of tokens that entered the experts to the host, as an update
does for each micro-batch. The two passes take turns, and the pass that runs first alternates; the output shows medians
of the CPU seconds, and the median of the pairs' ratios. The replayed routes are the model's own, so both passes compute
the same result.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recipe.offpolicy.replay.routed_model import RoutedModel, install_replay
from scripts.harness import add_counts, build_parser, find_median_ratio, take_turns, time_call

WORDS, ROWS = 512, 16


def build_mixture(hidden: int, experts: int, top_k: int, layers: int) -> Any:
    """Build a Qwen3-MoE with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    widths = dict(hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=hidden // 2)
    routing = dict(num_experts=experts, num_experts_per_tok=top_k, num_hidden_layers=layers)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=32)
    config = Qwen3MoeConfig(vocab_size=WORDS, max_position_embeddings=4096, **widths, **routing, **heads)
    return Qwen3MoeForCausalLM(config).train()


def run_pass(model: Any, ids: Tensor) -> None:
    """Run a forward and a backward pass."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()


def run_replayed(model: Any, ids: Tensor, routed: RoutedModel, routes: Tensor) -> None:
    """Run the same pass with recorded routes."""
    routed.arm(routes)
    run_pass(model, ids)
    assert (routed.count_entered()[:, :2] == ids.numel()).all(), "routes did not act"
    routed.disarm()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser(__doc__)
    add_counts(parser, hidden=128, experts=8, top_k=2, layers=4, tokens=2048, pairs=12)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = build_mixture(given.hidden, given.experts, given.top_k, given.layers)
    ids = torch.randint(WORDS, (ROWS, given.tokens // ROWS))
    routed = install_replay(model)
    routed.record_own()
    run_pass(model, ids)
    routes = routed.stack_ids().to(torch.int16)
    routed.disarm()
    passes = {"native": partial(run_pass, model, ids), "replayed": partial(run_replayed, model, ids, routed, routes)}
    taken = take_turns({name: partial(time_call, each) for name, each in passes.items()}, given.pairs)
    native, replayed = ([one.cpu for one in taken[name]] for name in passes)
    print(
        f"{given.experts} experts, {given.top_k} a token, {given.layers} layers, hidden {given.hidden}, {ids.numel()} "
        f"tokens: {statistics.median(native):.3f} s native, {statistics.median(replayed):.3f} s replayed, "
        f"{find_median_ratio(replayed, native) - 1:+.1%} in the median of {given.pairs} pairs"
    )


if __name__ == "__main__":
    main()
