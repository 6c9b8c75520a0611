"""The client that records supports, wrapped around verl's own clients."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.support.token_supports import NOTE, SupportError, TokenSupports, read_note
from tests.support.scripted_client import KINDS, PROMPT, ask, serve

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl.workers.rollout.llm_server")


def answer(*tokens: int, reason: str = "completed") -> dict[str, Any]:
    """Each token's support contains only the token itself."""
    from recipe.offpolicy.support.support_replay import ANSWER

    found = TokenSupports(np.ones(len(tokens), np.uint8), np.array(tokens, np.uint8), np.ones(len(tokens), np.float32))
    return {"token_ids": list(tokens), "stop_reason": reason, "extra_fields": {ANSWER: found} if tokens else {}}


def read(output: Any) -> Any:
    return read_note(pickle.loads(pickle.dumps(output.extra_fields[NOTE])))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_resumed_request_keeps_the_supports_of_its_attempts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.support.support_replay import note_supports

    script = answer(5, 6, reason="aborted"), answer(reason="aborted"), answer(7)
    found = read(ask(serve(kind, note_supports, monkeypatch, *script)))
    assert found.list_places().tolist() == [2, 3, 4]
    assert found.supports.ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_rows_that_share_ids_are_noted_by_the_task(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows with one id, whose turns alternate: 5 and 8 belong to the first row, 6 and 9 to the second."""
    from recipe.offpolicy.support.support_replay import note_supports

    pause = asyncio.sleep
    client = serve(kind, note_supports, monkeypatch, *(answer(token) for token in (5, 6, 8, 9)))

    async def row(first: int) -> Any:
        one = await client.generate("det-0", prompt_ids=PROMPT, sampling_params={})
        await pause(0)
        await client.generate("det-0", prompt_ids=[*PROMPT, first, 7], sampling_params={})
        return one

    async def both() -> Any:
        return await asyncio.gather(row(5), row(6))

    notes = [read(output) for output in asyncio.run(both())]
    assert [note.supports.ids.tolist() for note in notes] == [[5, 8], [6, 9]]
    assert notes[0].spans == notes[1].spans == ((2, 1), (4, 1))


def test_other_clients_are_refused() -> None:
    from recipe.offpolicy.support.support_replay import note_supports

    with pytest.raises(SupportError, match="is SimpleNamespace, but supports are recorded only for verl's own"):
        note_supports(SimpleNamespace())  # type: ignore[arg-type]
