"""verl's vLLM server hands flat log-probs of prompts on as they are, and starts as the registry's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.verl("!=0.7.1")
pytest.importorskip("vllm")


@pytest.mark.slow
def test_flat_log_probs_are_handed_on_with_what_the_cache_gave() -> None:
    from vllm.logprobs import FlatLogprobs, Logprob

    from recipe.offpolicy.extensions.process_reward.prefix_scorer import PROMPT
    from recipe.offpolicy.extensions.process_reward.scoring_server import keep_flat

    seen: list[Any] = []
    keep = keep_flat(lambda *given: seen.append(given))
    flat = FlatLogprobs()
    for position in (None, {5: Logprob(-0.5, 1)}, {6: Logprob(-1.5, 2)}):
        flat.append(position)
    fields: dict[str, Any] = {}
    keep(SimpleNamespace(prompt_logprobs=flat, num_cached_tokens=1), 0, fields)
    assert (list(fields[PROMPT].ids), list(fields[PROMPT].log_probs), fields[PROMPT].cached) == (
        [5, 6],
        [-0.5, -1.5],
        1,
    )
    assert seen == []
    keep(SimpleNamespace(prompt_logprobs=None), None, fields)
    assert len(seen) == 1


def test_replicas_of_vllm_start_servers_that_score(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.extensions.process_reward.prefix_value_rewards import serve_scores
    from recipe.offpolicy.extensions.process_reward.scoring_server import ScoringReplica, ScoringServer
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    serve_scores()
    assert RolloutReplicaRegistry.get("vllm") is ScoringReplica
    assert ScoringServer.score_tails.__doc__
