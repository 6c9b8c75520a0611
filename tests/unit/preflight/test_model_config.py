"""The model's config.json: which models are mixtures of experts, and the effect of a contradiction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.preflight.auto_choice import read_setup
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.model_files import (
    count_largest_tensor,
    find_experts,
)


def config(path: Path | str, model: str | None = None) -> DictConfig:
    return OmegaConf.create(
        {
            "setup": {"model": model, "engine": "different", "mode": "sync", "trajectory": "single", "minibatches": 1},
            "actor_rollout_ref": {"model": {"path": str(path)}, "actor": {"strategy": "fsdp"}, "rollout": {}},
        }
    )


def saved(folder: Path, values: Any) -> Path:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8},
        {"model_type": "deepseek_v3", "n_routed_experts": 256, "n_shared_experts": 1},
        {"model_type": "ernie4_5_moe_vl", "text_config": {"moe_num_experts": [64, 64]}},
    ],
    ids=lambda values: values["model_type"],
)
def test_a_mixture_of_experts(values: dict[str, Any], tmp_path: Path) -> None:
    found = find_experts(config(saved(tmp_path, values)))
    assert found[0]


@pytest.mark.parametrize(
    "values",
    [{"model_type": "qwen2", "num_hidden_layers": 24}, {"model_type": "granite", "num_local_experts": 0}],
    ids=lambda values: values["model_type"],
)
def test_a_dense_model(values: dict[str, Any], tmp_path: Path) -> None:
    file = saved(tmp_path, values) / "config.json"
    assert find_experts(config(tmp_path)) == (False, f"{file} specifies no experts")


def test_a_contradiction_stops_correction_auto(tmp_path: Path) -> None:
    mixture = saved(tmp_path, {"num_experts": 64})
    with pytest.raises(SpecError) as caught:
        read_setup(Composed(config(mixture, "dense")))
    assert str(caught.value) == (
        f"setup.model=dense: the configuration implies moe: {mixture}/config.json has num_experts=64. "
        f"Set setup.model=null to use the value that the configuration implies, or change the configuration."
    )
    assert caught.value.problem.overrides == ()
    assert read_setup(Composed(config(mixture))).model == "moe"
    assert read_setup(Composed(config(mixture, "moe"))).model == "moe"
    with pytest.raises(SpecError, match="the configuration implies dense"):
        read_setup(Composed(config(saved(tmp_path, {"num_hidden_layers": 2}), "moe")))


# The largest tensor of a model, from headers of its files: sharded, pickled, tied, stacked, or not at hand


EMBEDDING = "model.embed_tokens.weight"


def test_experts_count_as_one_tensor_where_they_are_stacked(tmp_path: Path) -> None:
    """8 experts with 3 matrices of 64 x 32: 49 152 elements; one matrix has 2048, and the embedding 3200."""
    names = [f"model.layers.0.mlp.experts.{i}.{part}_proj.weight" for i in range(8) for part in ("gate", "up", "down")]
    tensors = {EMBEDDING: torch.zeros(100, 32)} | {name: torch.zeros(64, 32) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    assert count_largest_tensor(tmp_path) == 3200
    assert count_largest_tensor(tmp_path, stacked=True) == 49_152
