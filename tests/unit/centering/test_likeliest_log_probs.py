"""Log-probs of the likeliest tokens, next to log-probs that verl takes from logits of any dtype and temperature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.verl("==0.9.1")
POSITIONS, VOCABULARY, SIZE = 200, 500, 20


def in_float32(scaled: Tensor, tokens: Tensor) -> Tensor:
    """As flash-attention's cross-entropy, which reads rounded logits and sums in float32."""
    return scaled.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def in_its_dtype(scaled: Tensor, tokens: Tensor) -> Tensor:
    from verl.utils.torch_functional import logprobs_from_logits_v2

    return logprobs_from_logits_v2(scaled, tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("take", [in_float32, in_its_dtype])
@pytest.mark.parametrize("packed", [True, False])
def test_they_are_of_one_distribution(temperature: float, dtype: torch.dtype, take: Any, packed: bool) -> None:
    """An error of 0.1 nats in the mass of all likeliest tokens is one of thousands in the ratio of the tails."""
    from recipe.offpolicy.centering.score_centering import compute_log_probs
    from verl.workers.engine.fsdp.transformer_impl import _scale_logits_by_temperature

    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)
    each = torch.full((POSITIONS,), temperature)
    scaled = _scale_logits_by_temperature(logits, each[:, None], is_unit_temperature=temperature == 1)
    tokens = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
    ids = scaled.double().topk(SIZE).indices
    rows = torch.arange(POSITIONS)
    likeliest: Any = SimpleNamespace(places=rows + 1, rows=rows, ids=ids)
    layout: Any = SimpleNamespace(places=rows)
    given = {"temperature_rmpad" if packed else "temperature": each}
    found = compute_log_probs(logits, given, layout, likeliest, tokens, take(scaled, tokens))
    assert (found - scaled.double().log_softmax(-1).gather(-1, ids)).abs().max() < 2e-5
