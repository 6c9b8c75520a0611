"""Values compared with a hand-computed engine: three tokens, and every kind of unusable answer of vLLM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.offpolicy.extensions.process_reward import prefix_scorer
from recipe.offpolicy.extensions.process_reward.prefix_scorer import (
    PROMPT,
    PrefixScorer,
    Row,
    RowValues,
    ScoredPrompt,
    TailScores,
    find_boundaries,
    score_tails,
)
from recipe.offpolicy.extensions.process_reward.settings import ProcessSettings

A, B, EOS = 0, 1, 2
FORCE = [B]


class Characters:
    """A tokenizer of the characters 1 (A), 2 (B) and $ (the end); digits are used because a letter before a marker
    would hide it.
    """

    is_fast, eos_token_id = True, EOS
    text = "12$"

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, Any]:
        spans = [(place, place + 1) for place in range(len(text))]
        return {"input_ids": [self.text.index(each) for each in text], "offset_mapping": spans}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(self.text[each] for each in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.text[token]


def log_prob(context: list[int], token: int) -> float:
    """A policy by hand: p(1) = (1 + ones so far) / (3 + length), and the others share the rest."""
    p = (1 + context.count(A)) / (3 + len(context))
    return math.log(p if token == A else (1 - p) / 2)


Answer = Callable[[dict[str, Any], list[int], dict[str, Any]], Any]


class Engine:
    """A rollout server of that policy, with ``ScoringServer.score_tails``.

    Args:
        version: of the weights, or one for each request.
        spoil: changes what an answer says of its prompt: (fields, prompt, sampling) -> stop reason or None.
    """

    def __init__(self, version: Any = 3, spoil: Answer | None = None) -> None:
        self.versions = version if callable(version) else lambda number: version
        self.spoil = spoil
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self.rows: list[str] = []

    async def __call__(self, request: str, row: Any, tails: Any, read_cache: bool) -> TailScores:
        self.rows.append(request)
        return await score_tails(self.generate, row, tails, read_cache=read_cache)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        version = self.versions(len(self.requests))
        self.requests.append((prompt_ids, sampling_params))
        await asyncio.sleep(0)
        found = [log_prob(prompt_ids[:place], prompt_ids[place]) for place in range(1, len(prompt_ids))]
        fields = {"ids": prompt_ids[1:], "log_probs": found, "cached": 0}
        reason = self.spoil(fields, prompt_ids, sampling_params) if self.spoil else None
        extra_fields = {"global_steps": version, PROMPT: ScoredPrompt(**fields)} if fields else {}
        return SimpleNamespace(stop_reason=reason or "completed", extra_fields=extra_fields)


def settings(**changed: Any) -> ProcessSettings:
    values = {"force_prompt": "2", "think_end": "", "markers": ["21"], "max_tokens": 99} | changed
    return ProcessSettings.from_mapping("process_reward", values)


def score(engine: Engine, row: Row, **changed: Any) -> RowValues:
    return RowValues(**asyncio.run(PrefixScorer(settings(**changed), engine, Characters()).score(row)))


def row(**changed: Any) -> Row:
    """Prompt 1, response "121$", answer "11"; the marker "21" begins the second episode at token 1."""
    given = {"prompt": [A], "response": [A, B, A, EOS], "mask": [1, 1, 1, 1], "truth": {"ground_truth": "11"}}
    return Row(**(given | {"version": 3} | changed))


def value(prefix: list[int], answer: list[int]) -> float:
    """Mean log-prob of the answer, by hand."""
    context = prefix + FORCE
    return sum(log_prob(context + answer[:k], answer[k]) for k in range(len(answer))) / len(answer)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_scorer, "PAUSE", 0.0)


def test_values_by_hand() -> None:
    engine = Engine()
    found = score(engine, row(request="r"))
    assert found.ends == [1, 3]
    expected = [value([A], [A, A]), value([A, A], [A, A]), value([A, A, B, A], [A, A])]
    assert found.values == pytest.approx(expected)
    # The first one in full: behind "12", p(1) is 2/5, and behind "121" 3/6.
    assert found.values[0] == pytest.approx((math.log(2 / 5) + math.log(3 / 6)) / 2)
    assert (found.version, found.error, found.requests, found.rescored) == (3, None, 3, 0)
    assert engine.rows == ["r"]
    assert found.answers == [([B, A, A], 2)]


def test_of_alternatives_the_likeliest_counts() -> None:
    found = score(Engine(), row(truth={"ground_truth": ["2", "1"]}))
    assert found.values == pytest.approx([max(value(p, [A]), value(p, [B])) for p in ([A], [A, A], [A, A, B, A])])
    assert found.best == [0 if value(p, [B]) > value(p, [A]) else 1 for p in ([A], [A, A], [A, A, B, A])]


def test_a_value_is_at_least_the_floor() -> None:
    assert score(Engine(), row(), floor=-0.5).values == pytest.approx(
        [max(each, -0.5) for each in score(Engine(), row()).values]
    )


def garbage(fields: dict[str, Any], places: range) -> None:
    for place in places:
        fields["ids"][place], fields["log_probs"][place] = 77, 1e38


def test_positions_from_the_cache_are_not_read_and_the_answer_behind_them_is() -> None:
    """Two tokens of each prompt come from the cache, so their entries are meaningless."""

    def spoil(fields: dict[str, Any], prompt: list[int], sampling: dict[str, Any]) -> None:
        if not sampling["skip_reading_prefix_cache"]:
            fields["cached"] = 1
            garbage(fields, range(1))

    engine = Engine(spoil=spoil)
    found = score(engine, row())
    assert found.values == pytest.approx(score(Engine(), row()).values)
    assert (found.requests, found.rescored, found.cached) == (3, 0, 2)
    # Siblings share V_0, whose answer would be cached.
    assert [each["skip_reading_prefix_cache"] for _, each in engine.requests].count(True) == 1


@pytest.mark.parametrize(
    "case", ["the answer is cached", "no one says how much", "garbage ids", "a shorter list", "not finite"]
)
def test_what_cannot_be_trusted_is_scored_anew_with_the_cache_skipped(case: str) -> None:
    def spoil(fields: dict[str, Any], prompt: list[int], sampling: dict[str, Any]) -> None:
        if sampling["skip_reading_prefix_cache"]:
            return
        if case == "the answer is cached":
            # Ids and log-probs look right, and are left over from somebody's request.
            fields["cached"] = len(prompt) - 2
            fields["log_probs"] = [-0.25 for _ in prompt[1:]]
        elif case == "no one says how much":
            fields["cached"] = None
        elif case == "garbage ids":
            garbage(fields, range(len(prompt) - 2, len(prompt) - 1))
        elif case == "a shorter list":
            fields["ids"], fields["log_probs"] = fields["ids"][-1:], fields["log_probs"][-1:]
        else:
            fields["log_probs"][-2] = math.nan

    found = score(Engine(spoil=spoil), row())
    assert found.values == pytest.approx(score(Engine(), row()).values)
    assert (found.requests, found.rescored, found.error) == (5, 2, None)


def test_a_server_that_never_answers_with_the_answers_tokens_leaves_the_row_unscored() -> None:
    def spoil(fields: dict[str, Any], prompt: list[int], sampling: dict[str, Any]) -> None:
        garbage(fields, range(len(prompt) - 1))

    found = score(Engine(spoil=spoil), row())
    assert found.values == []
    assert "did not score the 2 tokens of the answer" in str(found.error)


def test_a_row_whose_values_are_of_two_versions_is_scored_anew() -> None:
    """Newer weights give the second of nine answers; then the engine returns to the row's weights."""
    engine = Engine(version=lambda number: 4 if number == 1 else 3)
    found = score(engine, row())
    assert (found.version, found.requests, found.error) == (3, 6, None)
    assert len(found.values) == 3


def test_a_row_whose_version_has_gone_is_left_unscored() -> None:
    found = score(Engine(version=4), row())
    assert found.values == []
    assert found.requests == 9
    assert found.error == "the last token was sampled by weights of version 3, but the values have 4."


def test_an_abort_is_waited_out() -> None:
    left = [1]

    def spoil(fields: dict[str, Any], prompt: list[int], sampling: dict[str, Any]) -> str | None:
        return "aborted" if left and left.pop() else None

    found = score(Engine(spoil=spoil), row())
    assert (len(found.values), found.requests, found.error) == (3, 6, None)
    always = score(Engine(spoil=lambda *_: "abort"), row())
    assert "aborted" in str(always.error)


def test_an_exception_is_shipped_and_not_raised() -> None:
    async def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no server")

    found = asyncio.run(PrefixScorer(settings(), fails, Characters()).score(row()))
    assert (found["error"], found["values"]) == ("RuntimeError: no server", [])


def test_answers_that_cannot_be_scored_say_why() -> None:
    assert "reward_model.ground_truth contains no answer" in str(score(Engine(), row(truth=None)).error)
    assert "2 tokens, more than max_answer_tokens=1" in str(score(Engine(), row(), max_answer_tokens=1).error)
    assert score(Engine(), row(), max_answer_tokens=2).error is None


def test_boundaries_stand_behind_sampled_tokens_and_before_the_end() -> None:
    def find(text: str, mask: list[int], **changed: Any) -> list[int]:
        ids = Characters()(text)["input_ids"]
        return find_boundaries(list(text), mask, ids, settings(**changed), frozenset([EOS]))

    assert find("1121$", [1] * 5) == [2, 4]
    assert find("1121", [1] * 4) == [2, 4]  # cut at its length
    assert find("11211", [1, 1, 0, 0, 1]) == [5]  # the marker is in a tool's output
    assert find("1112", [1, 1, 0, 0]) == [2]  # the response ends with a tool's output
    assert find("1221", [1] * 4, think_end="22") == [1]
    assert find("22", [1] * 2, think_end="22") == []
