"""The section ``opd``, and the checks before Ray starts: other keys, and the teacher."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.batch.declared_keys import Configured
from recipe.offpolicy.correction import Problem
from recipe.offpolicy.correction.problem import CheckError, SpecError
from recipe.offpolicy.extensions.add_on import own_launch
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.opd.distillation import OnPolicyDistillation
from recipe.offpolicy.extensions.opd.settings import OpdSettings, TeacherSettings
from recipe.offpolicy.extensions.opd.start_up import find_model, find_other_vocabulary, find_problems
from recipe.offpolicy.extensions.opd.teacher_client import TeacherError
from scripts.quickstart.model import build_tokenizer
from tests.support.fake_teacher import FakeTeacher, Rule, by_place, serving

URL = {"url": "http://127.0.0.1:8100"}


def read(**values: Any) -> OpdSettings:
    return OpdSettings.from_mapping("opd", {"mode": "advantage", "teacher": URL} | values)


def test_sources_have_the_keys_of_the_teacher_unless_they_set_their_own() -> None:
    teacher = {"url": "http://a", "timeout": 5.0, "api_key": "KEY", "sources": {"gsm8k/main": {"url": "http://b"}}}
    default, own = read(teacher=teacher).teachers.values()
    assert (default.urls, own.urls) == (("http://a",), ("http://b",))
    assert (own.timeout, own.api_key) == (default.timeout, default.api_key) == (5.0, "KEY")
    assert list(read(teacher={"sources": {"math": URL}}).teachers) == ["math"]


def of_source(**keys: Any) -> dict[str, Any]:
    return {"teacher": URL | {"sources": {"math": keys}}}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"teacher": URL | {"api_key": "sk-very-secret-1"}}, "opd.teacher.api_key"),
        ({"teacher": URL | {"headers": {"X-Team": "very-secret 1"}}}, "opd.teacher.headers"),
        (of_source(url="http://b", api_key="very-secret!"), "opd.teacher.sources.math.api_key"),
        ({"mode": "loss", "scale": 2.0}, "opd.scale"),
        (of_source(url="http://b", timeout=-1), "opd.teacher.sources.math.timeout"),
        (of_source(url="http://b", modle="m"), "opd.teacher.sources.math.modle"),
        (of_source(model="m"), "opd.teacher.sources.math"),
        ({"teacher": {"url": "http://[::1"}}, "opd.teacher.url"),
        ({"teacher": URL | {"sources": ["math"]}}, "opd.teacher.sources"),
        ({"schedule": {"by": "step", "start": 3}}, "opd.schedule"),
        ({"schedule": {"by": "gap", "start": 3, "end": 3}}, "opd.schedule"),
        ({"schedule": {"start": 3}}, "opd.schedule.start"),
    ],
)
def test_what_cannot_be_meant_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises((CheckError, SpecError)) as caught:
        read(**values)
    error: Any = caught.value
    (problem,) = error.problems if isinstance(error, CheckError) else [error.problem]
    assert problem.key == key
    assert "very-secret" not in str(error)


# What is looked at before Ray starts: keys next to opd, and the teacher


PROMPTS = [[{"role": "user", "content": text}] for text in ("one", "two")]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    build_tokenizer("Spell backward:").save_pretrained(folder)
    return folder


def alike(body: dict[str, Any]) -> list[int]:
    """The teacher's tokenizer and template equal the student's."""
    tokenizer = build_tokenizer("Spell backward:")
    if "messages" in body:
        found: Any = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        return list(found["input_ids"] if hasattr(found, "keys") else found)
    return list(tokenizer(body["prompt"], add_special_tokens=False)["input_ids"])


def restless(by: float) -> Rule:
    """A teacher that scores every second row differently."""
    turns = itertools.cycle((0.0, by))

    def score(ids: Sequence[int]) -> list[float]:
        apart = next(turns)
        return [value - apart for value in by_place(ids)]

    return score


@pytest.fixture
def teacher() -> Iterator[FakeTeacher]:
    with serving(FakeTeacher(tokenize=alike)) as serves:
        yield serves


def problems(url: str, student: Path, *, teacher: dict[str, Any] | None = None, **changes: Any) -> list[Problem]:
    settings = OpdSettings.from_mapping(
        "opd",
        {
            "mode": changes.pop("mode", "advantage"),
            "teacher": {"url": url} | (teacher or {}),
            "eligible": changes.pop("eligible", {}),
        },
    )
    data = student / "train.parquet"
    pandas.DataFrame({"prompt": PROMPTS} | changes.pop("columns", {})).to_parquet(data)
    if changes.pop("spoilt", False):
        data.write_bytes(data.read_bytes()[:-9])
    config = OmegaConf.create(
        {
            "data": {"train_files": str(data), "max_prompt_length": 20, "max_response_length": 10},
            "actor_rollout_ref": {"rollout": {"temperature": 1.0, "n": 8}, "model": {"path": str(student)}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return list(find_problems("opd", settings, Configured(config, "opd")))


def test_a_teacher_of_the_students_family_passes(teacher: FakeTeacher, student: Path) -> None:
    assert problems(teacher.url, student) == []
    assert problems(teacher.url, student, teacher={"tokenizer": str(student)}) == []


def test_each_teacher_is_examined_and_a_source_without_prompts_refused(teacher: FakeTeacher, student: Path) -> None:
    columns = {"columns": {"data_source": ["math"] * len(PROMPTS)}}
    assert problems(teacher.url, student, teacher={"sources": {"math": {"url": teacher.url}}}, **columns) == []
    (dead,) = problems(teacher.url, student, teacher={"sources": {"math": {"url": "http://127.0.0.1:9"}}}, **columns)
    assert (dead.key, dead.verdict) == ("opd.teacher.sources.math.url", "ERROR")
    (unknown,) = problems(teacher.url, student, teacher={"sources": {"code": {"url": teacher.url}}}, **columns)
    key = "opd.teacher.sources.code.url"
    assert str(unknown) == f"{key}={teacher.url}: no training prompt has the data_source code. The data has: math."


def test_a_key_that_is_not_exported_is_said_with_its_fix_alone(teacher: FakeTeacher, student: Path) -> None:
    (problem,) = problems(teacher.url, student, teacher={"api_key": "NOT_EXPORTED"})
    assert problem.reason == "the environment variable NOT_EXPORTED of opd.teacher.api_key is not set."
    assert problem.fix == "Export it where the trainer runs, on a cluster before `ray start`."


@pytest.mark.parametrize("raw", [b"<html>", {"data": [None]}])
def test_a_server_of_something_else_is_named(raw: object) -> None:
    with serving(FakeTeacher(described=raw)) as teacher:
        settings = TeacherSettings((teacher.url,))
        with pytest.raises(TeacherError, match=teacher.url):
            find_model(settings)
        with pytest.raises(TeacherError, match=teacher.url):
            list(find_other_vocabulary(settings, "teacher", build_tokenizer("Spell backward:")))


def test_a_secret_in_the_address_is_refused_and_a_strangers_is_not_asked(teacher: FakeTeacher, student: Path) -> None:
    url = teacher.url.replace("http://", "http://user:hunter2@")
    (problem,) = problems(url, student)
    assert (problem.verdict, "hunter2" in str(problem)) == ("ERROR", False)
    token = own_launch.set(False)
    try:
        teacher.headers.clear()
        (problem,) = problems(teacher.url, student)
    finally:
        own_launch.reset(token)
    assert (problem.verdict, teacher.headers) == ("NOTE", [])


@pytest.mark.parametrize(
    ("change", "said", "fix"),
    [
        ({"models": ("one", "two")}, "serves one, two, so one of these models must be selected", "scripts/teacher.sh"),
        ({"length": 30}, "the teacher accepts 30 tokens, but prompt and response have up to 30", "--max-model-len 31"),
        ({"score": "noisy"}, "answers are not repeatable", "float32"),
        ({"tokenize": lambda body: [0]}, "its tokenizer and the student's disagree", "student's own family"),
        (
            {"tokenize": lambda body: [0] if "messages" in body else alike(body)},
            "chat templates of teacher and student render training prompt 0 as different ids",
            "opd.teacher.other_template=true",
        ),
    ],
)
def test_each_fault_of_a_teacher_has_a_fix(change: dict[str, Any], said: str, fix: str, student: Path) -> None:
    if change.get("score") == "noisy":
        change = {"score": restless(0.2)}
    with serving(FakeTeacher(**({"tokenize": alike} | change))) as teacher:
        (problem,) = problems(teacher.url, student)
    assert problem.verdict == "ERROR"
    assert said in problem.reason
    assert fix in problem.advice


def test_a_teacher_of_16_bits_is_noted(student: Path) -> None:
    with serving(FakeTeacher(tokenize=alike, score=restless(0.01))) as teacher:
        (problem,) = problems(teacher.url, student)
    assert problem.verdict == "NOTE"
    assert "differ by 0.01 nats" in problem.reason


def test_a_teacher_that_is_not_there_is_wrong(student: Path) -> None:
    (problem,) = problems("http://127.0.0.1:9", student)
    assert (problem.verdict, problem.key) == ("ERROR", "opd.teacher.url")
    assert "ConnectionError" in problem.reason


def test_another_model_and_another_tokenizer_are_refused(teacher: FakeTeacher, student: Path, tmp_path: Path) -> None:
    (problem,) = problems(teacher.url, student, teacher={"model": "other"})
    assert "but not other" in problem.reason
    build_tokenizer("Something else:").save_pretrained(tmp_path)
    (problem,) = problems(teacher.url, student, teacher={"tokenizer": str(tmp_path)})
    assert problem.reason == "its vocabulary differs from the student's."


def test_without_the_students_tokenizer_nothing_is_compared(teacher: FakeTeacher, student: Path) -> None:
    (problem,) = problems(teacher.url, student, actor_rollout_ref__model__path="/nowhere")
    assert problem.verdict == "NOTE"
    assert "vocabulary and chat template are not compared" in problem.reason


FILTERED = {"algorithm__filter_groups__enable": True}


@pytest.mark.parametrize(
    ("changes", "verdict", "override"),
    [
        ({"distillation__enabled": True}, "ERROR", "distillation.enabled=false"),
        ({"actor_rollout_ref__rollout__temperature": 0.7}, "ERROR", "actor_rollout_ref.rollout.temperature=1.0"),
        (FILTERED, "ERROR", "algorithm.filter_groups.enable=false"),
        (FILTERED | {"eligible": {"max_pass_rate": 0.1}}, "NO-OP", "algorithm.filter_groups.enable=false"),
        ({"algorithm__adv_estimator": "gae"}, "ERROR", "opd=loss"),
        ({"eligible": {"max_pass_rate": 0.12}}, "NO-OP", "opd.eligible.max_pass_rate=0.125"),
    ],
)
def test_keys_that_it_cannot_stand_beside(
    changes: dict[str, Any], verdict: str, override: str, teacher: FakeTeacher, student: Path
) -> None:
    found = problems(teacher.url, student, **changes)
    said = [(each.verdict, f"{each.overrides} {each.advice}".replace("opd.mode=loss", "opd=loss")) for each in found]
    assert [verdict for verdict, advice in said if override in advice] == [verdict], said


@pytest.mark.parametrize(("images", "said"), [([None, []], 0), ([[], [b"png"]], 1)])
def test_rows_with_pictures_are_refused(images: list[Any], said: int, teacher: FakeTeacher, student: Path) -> None:
    found = problems(teacher.url, student, columns={"images": images}, data__image_key="images")
    assert [(each.key, each.verdict, each.overrides) for each in found] == said * [("data.image_key", "ERROR", ())]


def test_a_resumed_run_may_ask_a_teacher_at_another_address_and_changes_nothing_else(tmp_path: Path) -> None:
    def hooks(**changes: Any) -> AddOns:
        return AddOns([OnPolicyDistillation("opd", {"mode": "advantage", "teacher": URL} | changes)])

    states = hooks().state(tmp_path)
    assert hooks(teacher={"url": ["http://two:8100", "http://three:8100"]}).differences(states) == []
    assert hooks(mode="loss", horizon=8).differences(states) == [
        "opd.horizon: not there in the checkpoint, 8 now",
        'opd.mode: "advantage" in the checkpoint, "loss" now',
    ]
    assert 'opd.mode: "advantage" in the checkpoint, not there now' in AddOns().differences(states)
