"""Requests to a teacher: the token to which a log-prob belongs, and faults of the connection."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recipe.offpolicy.extensions.opd import teacher_client
from recipe.offpolicy.extensions.opd.settings import TeacherSettings
from recipe.offpolicy.extensions.opd.start_up import find_model
from recipe.offpolicy.extensions.opd.teacher_client import Row, TeacherClient, TeacherError, open_session, shorten
from recipe.offpolicy.fault_tolerance.redaction import RedactedStream, redact, redact_text
from tests.support.fake_teacher import FakeTeacher, serving


def scored(teacher: FakeTeacher, rows: list[Row], **changes: Any) -> tuple[list[list[float]], int]:
    """Log-probs, and the number of repeated requests."""
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


def test_what_the_teacher_excludes_is_minus_infinity() -> None:
    with serving(FakeTeacher(score=lambda ids: [-0.5] * (len(ids) - 2) + [-9999.0])) as teacher:
        assert scored(teacher, ROWS)[0] == [[-0.5, -math.inf], [-math.inf]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (change, "sequence 0: prompt_logprobs do not match the 3 tokens")
            for change in (
                lambda entries: entries[:-1],
                lambda entries: [*entries[1:], entries[0]],
                lambda entries: [*entries[:-1], None],
                lambda entries: None,
            )
        ),
        *(
            (lambda entries, value=value: [*entries[:-1], {"9": {"logprob": value}}], "position 2: the log-prob is")
            for value in (None, True, math.nan, 0.5)
        ),
    ],
)
def test_a_position_that_is_lost_repeated_shifted_or_foreign_stops(
    change: Callable[[list[Any]], list[Any]], said: str
) -> None:
    with serving(FakeTeacher(change=change)) as teacher:
        with pytest.raises(TeacherError, match=said) as caught:
            scored(teacher, ROWS)
        assert f"the teacher at {teacher.url}, " in str(caught.value)


CHOICE = {"index": 0, "prompt_logprobs": [None]}
ANSWERS: dict[str, object] = {
    "no JSON": b"<html>busy</html>",
    "choices that are none": {"choices": None},
    "an index twice": {"choices": [CHOICE, CHOICE]},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_malformed_names_address_and_sequences(name: str) -> None:
    with serving(FakeTeacher(raw=ANSWERS[name])) as teacher:
        with pytest.raises(TeacherError) as caught:
            scored(teacher, ROWS)
        assert f"the teacher at {teacher.url}, 2 sequences from 0 to 3" in str(caught.value)
        assert len(str(caught.value)) < 600


def test_an_answer_that_is_cut_short_is_asked_for_again() -> None:
    """A connection that ends before the announced length, and then a complete answer."""
    with serving(FakeTeacher(failures=[-1])) as teacher:
        assert scored(teacher, ROWS, retries=1) == ([[-0.01, -0.02], [-0.03]], 1)


def test_a_busy_teacher_is_asked_again_when_it_says() -> None:
    """Two answers 429, with a wait of 1 s and with a date in the past; without retries, the error is one sentence."""
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    with serving(FakeTeacher(failures=[429, 429], retry_after=["1", past])) as teacher:
        start = time.monotonic()
        assert scored(teacher, ROWS, retries=2) == ([[-0.01, -0.02], [-0.03]], 2)
        assert time.monotonic() - start >= 1
        teacher.failures, teacher.retry_after = [429, 503], ["0", "soon"]
        with pytest.raises(TeacherError, match=r"in 2 attempts for 2 sequences from 0 to 3 .*HTTP 503"):
            scored(teacher, ROWS, retries=1)


def test_secrets_come_by_environment_and_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEACHER", "Bearer abc")
    with serving(FakeTeacher(failures=[403])) as teacher:
        url = teacher.url.replace("http://", "http://user:hunter2@")
        with pytest.raises(TeacherError, match=r"http://\(hidden\)@127") as caught:
            scored(teacher, ROWS, urls=(url,), headers={"X-Key": "OF_THE_TEACHER"})
        assert "hunter2" not in str(caught.value)
        assert teacher.headers[-1]["X-Key"] == "Bearer abc"
        with pytest.raises(TeacherError, match=r"variable NOT_SET of opd\.teacher\.headers is not set"):
            open_session(TeacherSettings(urls=(url,), headers={"X-Key": "NOT_SET"}))


def test_another_address_is_tried() -> None:
    with serving(FakeTeacher()) as teacher:
        found, retried = scored(teacher, ROWS, urls=("http://127.0.0.1:9", teacher.url))
        assert found == [[-0.01, -0.02], [-0.03]]
        assert retried <= 1


@pytest.mark.parametrize(
    ("failures", "url", "said"),
    [
        ([500] * 3, None, "did not answer in 3 attempts for 2 sequences from 0 to 3 .*HTTP 500"),
        ([], "http://127.0.0.1:9", "did not answer in 3 attempts for 2 sequences from 0 to 3 .*ConnectionError"),
        ([404], None, "rejected 2 sequences from 0 to 3: HTTP 404"),
    ],
)
def test_a_teacher_that_is_dead_or_refuses_ends_in_a_sentence(failures: list[int], url: str | None, said: str) -> None:
    with serving(FakeTeacher(failures=failures)) as teacher, pytest.raises(TeacherError, match=said):
        scored(teacher, ROWS, urls=(url or teacher.url,))


def test_a_teacher_that_is_slow_ends_in_bounded_time() -> None:
    with serving(FakeTeacher()) as teacher:
        teacher.answering.clear()
        start = time.monotonic()
        with pytest.raises(TeacherError, match=r"not scored 2 sequences within 0\.3 s; 1 of 1 requests are unanswered"):
            scored(teacher, ROWS, timeout=0.3)
        assert time.monotonic() - start < 5
        teacher.answering.set()


# A server that demands a key ----------------------------------------------------------------------------------------

SECRET = "t3acher-secret"


@pytest.fixture
def guarded() -> Iterator[FakeTeacher]:
    """A server that accepts only the right key and team, and, like some servers, repeats wrong ones in its error."""

    class Guarded(FakeTeacher):
        def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            key, team = self.headers[-1].get("Authorization"), self.headers[-1].get("X-Team")
            if (key, team) != (f"Bearer {SECRET}", "rl-team-7"):
                return 401, {"error": f"wrong key {key}, team {team}"}
            return super().answer(path, body)

    with serving(Guarded()) as teacher:
        yield teacher


def keyed(teacher: FakeTeacher) -> TeacherSettings:
    return TeacherSettings(urls=(teacher.url,), api_key="KEY_OF_TEACHER", headers={"X-Team": "TEAM_OF_TEACHER"})


def test_a_refused_key_is_said_nowhere(
    guarded: FakeTeacher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key appears neither in the error, which quotes the server, nor in later output or logs of this process."""
    monkeypatch.setenv("KEY_OF_TEACHER", f"{SECRET}-of-before")
    monkeypatch.setenv("TEAM_OF_TEACHER", "rl-team-7")
    client = TeacherClient(keyed(guarded), "teacher")
    try:
        with pytest.raises(TeacherError, match=r"HTTP 401: .*wrong key .*\(hidden\), team \(hidden\)") as caught:
            client.wait(client.start(ROWS))
    finally:
        client.close()
    shown = (
        f"{caught.value} {redact_text(f'{client._server._session.headers}')} {redact({'a': [SECRET + '-of-before']})}"
    )
    assert SECRET not in shown
    assert "rl-team-7" not in shown
    assert (
        caught.value.fix
        == "set these environment variables to values that this server accepts: KEY_OF_TEACHER, TEAM_OF_TEACHER."
    )
    stream = RedactedStream(sys.stdout)
    stream.write(f"Traceback: {SECRET}-of-before\n")
    assert capsys.readouterr().out == "Traceback: (hidden)\n"


def test_a_secret_is_redacted_before_an_answer_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEACHER", SECRET)
    open_session(TeacherSettings(urls=("http://127.0.0.1:9",), api_key="KEY_OF_TEACHER")).close()
    for cut in range(1, len(SECRET)):
        assert SECRET[:4] not in shorten(f"{'x' * (300 - cut)}{SECRET} is wrong")


def test_a_server_that_demands_a_key_is_said_before_the_run(guarded: FakeTeacher) -> None:
    with pytest.raises(TeacherError, match=r"/v1/models: HTTP 401\. .* set opd.teacher.api_key \(rft: --api-key\) to"):
        find_model(TeacherSettings(urls=(guarded.url,)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "KEY_OF_TEACHER of opd.teacher.api_key is not set"),
        ("a\nb-secret", "contains characters that are not allowed in a header"),
    ],
)
def test_a_value_that_cannot_be_sent_is_not_said(value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEACHER", value)
    with pytest.raises(TeacherError, match=said) as caught:
        open_session(TeacherSettings(urls=("http://127.0.0.1:9",), api_key="KEY_OF_TEACHER"))
    assert "secret" not in str(caught.value)
