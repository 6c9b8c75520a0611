"""A real verl TrainingWorker whose engine replays routes: a tiny Qwen3-MoE, and rows with routes and their notes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from tests.support import training_worker as tw

LAYERS, EXPERTS, TOP_K = 3, 8, 2
STEP = 5


def tiny_mixture(folder: Path) -> Path:
    """A float32 Qwen3-MoE with random weights, saved with the tokenizer of the tiny Qwen2."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tw.tiny_model(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=tw.VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def start(model: Path, mode: str | None, *, oldest: int | None = None, **settings: Any) -> Any:
    """Start a worker that replays; if ``mode`` is None, verl's plain worker."""
    from recipe.offpolicy.replay.batch_routes import ReplaySettings
    from recipe.offpolicy.replay.fsdp_engine import install_in_worker

    worker = tw.start_worker(model, layer="Qwen3MoeDecoderLayer", **settings)
    if mode is not None:
        install_in_worker(SimpleNamespace(actor=worker), ReplaySettings(mode, oldest))  # type: ignore[arg-type]
    return worker


def draw_routes(tokens: int, seed: int = 3) -> Tensor:
    """Draw (tokens, LAYERS, TOP_K) distinct random experts."""
    scores = torch.rand(tokens, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., :TOP_K]


def with_routes(data: TensorDict, routes: Tensor, *, version: int = STEP - 1) -> Any:
    """Add routes (n, ...) of all tokens as a rollout returns them, without each row's last token, and the notes."""
    from recipe.offpolicy.replay.batch_routes import NOTE, ROUTES, hash_routes

    data = data.clone(recurse=False)
    rows = list(routes.split(data["input_ids"].offsets().diff().tolist()))
    fields = []
    for place, row in enumerate(rows):
        rows[place] = torch.cat([row[:-1], torch.zeros_like(row[-1:])]).to(torch.int16)
        versions = {"min_global_steps": version, "max_global_steps": version}
        fields.append({NOTE: [len(row) - 1, hash_routes(row[:-1])], **versions})
    data[ROUTES] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    data["extra_fields"] = NonTensorStack(*fields)
    return data


def flagged(data: TensorDict, on: bool = True) -> TensorDict:
    """Add what verl's worker and our trainer tell the engine."""
    from recipe.offpolicy.replay.batch_routes import REPLAY_STEP
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, **{"enable_routing_replay": on, REPLAY_STEP: STEP})
    return data
