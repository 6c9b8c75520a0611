"""Micro-batches with padded columns, as verl's V0 trainer passes them to its engine."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.seals import INPUT_COLUMNS


def pad_columns(data: TensorDict) -> TensorDict:
    """Pad the nested columns of a micro-batch, except its model input, and add the mask of prompts and responses."""
    nested = {name: data[name] for name in data.keys() if getattr(data[name], "is_nested", False)}
    padded = {name: column.to_padded_tensor(0) for name, column in nested.items() if name not in INPUT_COLUMNS}
    there = [
        torch.arange(padded[name].shape[1]) < nested[name].offsets().diff()[:, None]
        for name in ("prompts", "responses")
    ]
    made = data.select(*data.keys())
    for name, column in padded.items():
        made[name] = column
    made["loss_mask"] = made["response_mask"]
    made["attention_mask"] = torch.cat([there[0].flip(1), there[1]], 1).long()
    return made


def build_model_input(responses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Build the padded columns of a model's input, for sequences without prompts: responses (B, T)."""
    places = torch.arange(responses.shape[1]).expand_as(responses)
    return {"input_ids": responses, "attention_mask": torch.ones_like(responses), "position_ids": places.clone()}
