"""A micro-batch in verl's padded layout, made of log-probs alone: no engine and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec


def micro_batch(
    spec: CorrectionSpec, lengths: Sequence[int], *, dtype: torch.dtype = torch.float32, mismatch: float = 0.02
) -> tuple[dict[str, Tensor], TensorDict]:
    """(model_output, data) as the engine hands them to its loss, with the trainer's plan; rows have two turns."""
    from recipe.offpolicy.batch.plan import PLAN, SharedPlan, compute_constants
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(0)
    rows, width = len(lengths), max(lengths)
    whole = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    mask = whole.clone()
    mask[:, 10:20] = False
    pi = -3 * torch.rand(rows, width, generator=generator) - 0.01
    mu = (pi + mismatch * torch.randn(rows, width, generator=generator)).to(dtype)
    prompt = torch.ones(rows, 1, dtype=torch.int64)
    columns: dict[str, Any] = {
        "prompts": prompt,
        "responses": torch.ones(rows, width, dtype=torch.int64),
        "attention_mask": torch.cat([prompt, whole.long()], dim=-1),
        "response_mask": mask.long(),
        "old_log_probs": pi.to(dtype) if spec.proximal == "recompute" else mu,
        "rollout_log_probs": mu,
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
    }
    data = TensorDict(columns, batch_size=rows)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=rows)
    tu.assign_non_tensor(data, **{PLAN: SharedPlan(1, compute_constants(spec, data))})
    # verl's layout: log-probs flat over prompt and response, shifted left by one token.
    flat = [torch.cat([row[:length], row.new_zeros(1)]) for row, length in zip(pi, lengths, strict=True)]
    leaf = torch.cat(flat).to(dtype).requires_grad_()
    return {"log_probs": leaf * 1}, data
