"""Score centering: the workers' reports, and the log-probs of the likeliest tokens compared with verl's own."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.centering.score_centering import CenteringReport
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.support.support_settings import SupportSettings

pytestmark = pytest.mark.verl("==0.9.1")

REPORT = CenteringReport(tokens=100, members=2000, compared=8, checked=99, bytes=12_100, mass=98.0)


def add_on() -> Any:
    from recipe.offpolicy.centering.score_centering import ScoreCentering

    return ScoreCentering(SupportSettings(20, "full", likeliest=True))


def test_reports_of_ranks_and_mini_batches_are_summed() -> None:
    centering = add_on()
    metrics: dict[str, Any] = {"offpolicy_centering_report": [[REPORT], [replace(REPORT, checked=97, mass=90.0)]]}
    centering.on_update(metrics, None)
    assert metrics == {}
    assert centering.metrics() == pytest.approx(
        {
            "offpolicy/centering/head_mass": 0.94,
            "offpolicy/centering/sampled_share": 0.98,
            "offpolicy/centering/bytes": 24_200.0,
            "offpolicy/centering/bytes_a_token": 121.0,
        }
    )


def test_an_update_without_a_report_stops_the_run_and_one_without_tokens_does_not() -> None:
    centering = add_on()
    with pytest.raises(LivenessError, match="returned no report"):
        centering.on_update({}, None)
    empty = CenteringReport(0, 0, 0, 0, 0, 0.0)
    centering.on_update({"offpolicy_centering_report": [empty]}, None)
    assert math.isnan(centering.metrics()["offpolicy/centering/head_mass"])


def test_a_client_that_is_not_verls_is_refused_by_the_key_that_needs_it() -> None:
    from recipe.offpolicy.support.token_supports import SupportError

    with pytest.raises(SupportError, match=r"or set correction\.centering=null"):
        add_on().rollout_client(SimpleNamespace())


# Log-probs of the likeliest tokens, next to log-probs that verl takes from logits of any dtype and temperature


POSITIONS, VOCABULARY, SIZE = 200, 500, 20


def in_float32(scaled: Tensor, tokens: Tensor) -> Tensor:
    """Compute in float32 like flash-attention's cross-entropy, which reads rounded logits."""
    return scaled.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def in_its_dtype(scaled: Tensor, tokens: Tensor) -> Tensor:
    from verl.utils.torch_functional import logprobs_from_logits_v2

    return logprobs_from_logits_v2(scaled, tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("take", [in_float32, in_its_dtype])
def test_they_are_of_one_distribution(temperature: float, dtype: torch.dtype, take: Any) -> None:
    """An error of 0.1 nats in the mass of all likeliest tokens is an error of thousands in the ratio of the tails."""
    from recipe.offpolicy.centering.score_centering import compute_log_probs
    from verl.workers.engine.fsdp.transformer_impl import _scale_logits_by_temperature

    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)
    each = torch.full((POSITIONS,), temperature)
    scaled = _scale_logits_by_temperature(logits, each[:, None], is_unit_temperature=temperature == 1)
    tokens = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
    ids = scaled.double().topk(SIZE).indices
    rows = torch.arange(POSITIONS)
    likeliest = SimpleNamespace(places=rows + 1, ids=ids)
    forward: Any = SimpleNamespace(logits=logits, places=rows, temperature=each, tokens=tokens, supports=likeliest)
    found = compute_log_probs(forward, take(scaled, tokens))
    assert (found - scaled.double().log_softmax(-1).gather(-1, ids)).abs().max() < 2e-5
