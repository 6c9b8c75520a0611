"""Requests to a teacher: which token a log-prob belongs to, and what goes wrong on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from recipe.offpolicy.extensions.opd import teacher_client
from recipe.offpolicy.extensions.opd.settings import TeacherSettings
from recipe.offpolicy.extensions.opd.teacher_client import Row, TeacherClient, TeacherError, read_log_probs
from tests.support.fake_teacher import FakeTeacher, serving


def scored(teacher: FakeTeacher, rows: list[Row], **changes: Any) -> tuple[list[list[float]], int]:
    """Log-probs, and how many requests were sent again."""
    settings = TeacherSettings(urls=changes.pop("urls", (teacher.url,)), **changes)
    client = TeacherClient(settings, "teacher")
    try:
        scoring = client.start(rows)
        return client.wait(scoring), scoring.retried
    finally:
        client.close()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_client, "PAUSE", 0.01)


ROWS = [Row(0, (7,), (8, 9)), Row(3, (1, 2, 3), (4,))]


def test_a_response_begins_behind_its_prompt() -> None:
    """The token at position j has -j/100: (P, P + 1, ...) / 100 for a prompt of P tokens."""
    with serving(FakeTeacher()) as teacher:
        found, _ = scored(teacher, ROWS)
        assert found == [[-0.01, -0.02], [-0.03]]
        assert teacher.asked == [[7, 8, 9], [1, 2, 3, 4]]


def test_many_rows_are_several_requests_and_keep_their_order() -> None:
    rows = [Row(number, (1,) * (1 + number % 5), (2,) * (1 + number % 3)) for number in range(40)]
    with serving(FakeTeacher()) as teacher:
        found, _ = scored(teacher, rows)
        assert len(teacher.asked) == 40
    assert found == [[-(len(row.prompt) + place) / 100 for place in range(len(row.response))] for row in rows]


def test_nothing_is_asked_about_no_row() -> None:
    with serving(FakeTeacher()) as teacher:
        assert scored(teacher, []) == ([], 0)
        assert teacher.asked == []


def test_what_the_teacher_excludes_is_minus_infinity() -> None:
    with serving(FakeTeacher(score=lambda ids: [-0.5] * (len(ids) - 2) + [-9999.0])) as teacher:
        assert scored(teacher, ROWS)[0] == [[-0.5, -math.inf], [-math.inf]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entries: entries[:-1], "row 0: the teacher scored 2 positions of 3"),
        (lambda entries: [*entries, entries[-1]], "row 0: the teacher scored 4 positions of 3"),
        (lambda entries: [*entries[:2], entries[1]], "row 0, position 2: sent the token 9, the teacher scored"),
        (lambda entries: [*entries[1:], entries[0]], "row 0, position 0: the teacher scored a token"),
        (lambda entries: [*entries[:-1], {"5": {"logprob": -1.0}}], "sent the token 9, the teacher scored the token 5"),
        (lambda entries: [*entries[:-1], None], "sent the token 9, the teacher scored nothing"),
        (lambda entries: [*entries[:-1], {"9": {"logprob": 0.5}}], "row 0, position 2: a log-prob of 0.5"),
    ],
)
def test_a_position_that_is_lost_repeated_shifted_or_foreign_stops(
    change: Callable[[list[Any]], list[Any]], said: str
) -> None:
    with serving(FakeTeacher(change=change)) as teacher, pytest.raises(TeacherError, match=said):
        scored(teacher, ROWS)


def test_a_row_without_any_log_prob_stops() -> None:
    with pytest.raises(TeacherError, match="row 3: the teacher scored no positions of 4"):
        read_log_probs(None, ROWS[1])


def test_a_restart_within_the_retries_loses_no_row() -> None:
    with serving(FakeTeacher(failures=[503, 500])) as teacher:
        assert scored(teacher, ROWS, retries=2) == ([[-0.01, -0.02], [-0.03]], 2)


def test_another_address_is_tried() -> None:
    with serving(FakeTeacher()) as teacher:
        found, retried = scored(teacher, ROWS, urls=("http://127.0.0.1:9", teacher.url))
        assert found == [[-0.01, -0.02], [-0.03]]
        assert retried <= 1


@pytest.mark.parametrize(
    ("failures", "url", "said"),
    [
        ([500] * 3, None, "did not answer in 3 attempts for 2 rows .*HTTP 500"),
        ([], "http://127.0.0.1:9", "did not answer in 3 attempts for 2 rows .*ConnectionError"),
        ([404], None, "refused 2 rows: HTTP 404"),
    ],
)
def test_a_teacher_that_is_dead_or_refuses_ends_in_a_sentence(failures: list[int], url: str | None, said: str) -> None:
    with serving(FakeTeacher(failures=failures)) as teacher, pytest.raises(TeacherError, match=said):
        scored(teacher, ROWS, urls=(url or teacher.url,))


def test_a_teacher_that_is_slow_ends_in_bounded_time() -> None:
    with serving(FakeTeacher()) as teacher:
        teacher.answering.clear()
        start = time.monotonic()
        with pytest.raises(TeacherError, match=r"has not scored 2 rows within 0\.3 s; 1 of 1 requests are open"):
            scored(teacher, ROWS, timeout=0.3)
        assert time.monotonic() - start < 5
        teacher.answering.set()
