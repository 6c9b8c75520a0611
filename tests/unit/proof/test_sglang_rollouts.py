"""Log-probs of an engine in SGLang's format, through verl's own SGLang server and client, to the checks of mu."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.rollout_log_probs import RolloutLogProbError
from recipe.offpolicy.proof.token_alignment import AlignmentError
from recipe.offpolicy.trainer.supervision import Supervision
from tests.support.corrections import TIS
from tests.support.fake_sglang import VOCABULARY, Answer, Engine, build_server, installed, roll_out, score

pytestmark = pytest.mark.verl(">=0.9.1")

PROMPTS, SAMPLES, LENGTH = 32, 4, 24
LOGITS = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))


def changed(log_probs: Callable[[list[float]], list[float]]) -> Callable[[Answer], Answer]:
    """Answers whose tokens have other log-probs."""

    def change(answer: Answer) -> Answer:
        found = log_probs([log_prob for log_prob, _, _ in answer])
        return [(log_prob, token, None) for log_prob, (_, token, _) in zip(found, answer, strict=True)]

    return change


def sampled(engine: Engine, *, temperature: float = 1.0, logprobs: bool = True) -> TensorDict:
    """Responses of the engine, with the trainer's log-probs of them."""
    with installed() as module:
        prompts = [[1 + prompt % (VOCABULARY - 1)] for prompt in range(PROMPTS) for _ in range(SAMPLES)]
        asked = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": logprobs}
        rows = roll_out(build_server(module, engine, response_length=LENGTH), prompts, asked)
    rows["old_log_probs"] = score(rows, LOGITS, temperature)
    return rows


def supervise(rows: TensorDict) -> Supervision:
    own = {"allow_identical_log_probs": True, "allow_unrelated_log_probs": False}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {"ppo_epochs": 1}}, "offpolicy": own})
    supervision = Supervision(CorrectionSpec.from_mapping({"weight": TIS}), config)
    supervision.sampled(rows)
    supervision.aligned(rows, [str(row // SAMPLES) for row in range(PROMPTS * SAMPLES)])
    return supervision


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert importlib.util.find_spec("sglang") is None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (changed(lambda own: own[-1:] + own[:-1]), AlignmentError, "off by one token"),
        (lambda answer: None, RolloutLogProbError, "the batch contains only"),
    ],
    ids=["shifted", "lost"],
)
def test_wrong_log_probs_stop_the_first_update(
    change: Callable[[Answer], Answer | None], error: type[Exception], said: str
) -> None:
    rows = sampled(Engine(LOGITS, change=change))
    with pytest.raises(error, match=said):
        supervise(rows)


def test_log_probs_that_were_not_asked_for_are_missing() -> None:
    rows = sampled(Engine(LOGITS), logprobs=False)
    with pytest.raises(RolloutLogProbError, match="the batch contains only"):
        supervise(rows)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_raw_log_probs_are_told_by_the_mean_ratio(temperature: float) -> None:
    """At temperature 1, raw and processed log-probs are the same."""
    rows = sampled(Engine(LOGITS, raw=True), temperature=temperature)
    told = "were not sampled from the distribution"
    with nullcontext() if temperature == 1.0 else pytest.raises(RolloutLogProbError, match=told):
        supervise(rows)
