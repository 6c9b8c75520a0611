"""verl's vLLM server requests supports and returns them, and starts like the registry's server."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.offpolicy.support.support_settings import SupportSettings

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("vllm")

SETTINGS = SupportSettings(2, "mask")


def test_a_request_for_log_probs_asks_for_the_likeliest_ids() -> None:
    from recipe.offpolicy.support.support_replay import ask_for_supports

    build = ask_for_supports(lambda **given: given, SETTINGS)
    assert build(logprobs=0, top_p=0.9) == {"logprobs": 2, "flat_logprobs": True, "top_p": 0.9}
    assert build(logprobs=None) == {"logprobs": None}
    with_min_p = ask_for_supports(lambda **given: given, SupportSettings(2, "mask", 0.1))
    assert with_min_p(logprobs=0)["min_p"] == 0.1
    assert with_min_p(logprobs=0, min_p=0.3)["min_p"] == 0.3
    assert "min_p" not in with_min_p(logprobs=None)


def test_supports_are_put_beside_what_verl_extracts() -> None:
    from vllm.logprobs import FlatLogprobs

    from recipe.offpolicy.support.support_replay import ANSWER, extract_supports

    seen: list[Any] = []
    extract = extract_supports(lambda *given: seen.append(given), SupportSettings(2, "mask"))
    flat = FlatLogprobs()
    for token, share in ((7, 0.4), (9, 0.6)):
        likeliest = [math.log(share), math.log(0.6), math.log(0.4)]
        flat.append_fast([token, 9, 7], likeliest, iter([2, 1, 2]), [None] * 3)
    output = SimpleNamespace(outputs=[SimpleNamespace(logprobs=flat, token_ids=[7, 9])])
    fields: dict[str, Any] = {}
    extract(output, None, fields)
    assert fields[ANSWER].ids.tolist() == [7, 9, 9, 7]
    # As verl reads mu.
    read = [each[token].logprob for each, token in zip(output.outputs[0].logprobs, [7, 9], strict=True)]
    assert read == [math.log(0.4), math.log(0.6)]
    assert len(seen) == 1
    # Without log-probs, or with lists of another kind, there is no answer, and the workers stop the run.
    for other in (None, [{7: 0.0}]):
        fields = {}
        extract(SimpleNamespace(outputs=[SimpleNamespace(logprobs=other, token_ids=[7])]), None, fields)
        assert fields == {}


def test_replicas_of_vllm_start_servers_that_return_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.support import support_replay
    from verl.workers.rollout.replica import RolloutReplicaRegistry
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    support_replay.serve_supports(SETTINGS)
    replica = RolloutReplicaRegistry.get("vllm")
    assert issubclass(replica, vLLMReplica)
    monkeypatch.setattr(vLLMReplica, "__init__", lambda self: None)
    started: list[Any] = []
    actor = SimpleNamespace(remote=lambda *args, **kwargs: started.append((args, kwargs)))
    actor.options = lambda **options: started.append(options) or actor
    monkeypatch.setattr(support_replay.ray, "remote", lambda kind: actor)
    replica().server_class.options(name="server").remote(1, node_rank=0)
    assert started == [{"name": "server"}, ((1,), {"node_rank": 0, "support": SETTINGS})]
