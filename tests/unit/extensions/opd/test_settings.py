"""The section ``opd``: what it means."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction.problem import CheckError, SpecError
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from tests.support.applications import application

URL = {"url": "http://127.0.0.1:8100"}


def read(**values: Any) -> OpdSettings:
    return OpdSettings.from_mapping("opd", {"mode": "advantage", "teacher": URL} | values)


def test_addresses_are_one_or_several_with_or_without_v1() -> None:
    assert read(teacher={"url": "http://a:1/v1/"}).teachers[""].urls == ("http://a:1",)
    assert read(teacher={"url": ["http://a:1", "https://b"]}).teachers[""].urls == ("http://a:1", "https://b")


def test_a_scale_of_advantages_is_none_of_a_loss() -> None:
    with pytest.raises(CheckError) as caught:
        read(mode="loss", scale=2.0)
    (problem,) = caught.value.problems
    assert (problem.key, problem.overrides) == ("opd.scale", ("opd.scale=std",))


def test_headers_and_sources_can_be_set_on_the_command_line() -> None:
    sources = "opd.teacher.sources={gsm8k/main: {url: http://b, api_key: OTHER_KEY}}"
    with application("opd=loss", "opd.teacher.url=http://a", "opd.teacher.headers={X-Team: TEAM}", sources) as config:
        from omegaconf import OmegaConf

        values: Any = OmegaConf.to_container(config.opd)
    default, own = OpdSettings.from_mapping("opd", values).teachers.values()
    assert default.headers == own.headers == {"X-Team": "TEAM"}
    assert (own.urls, own.api_key) == (("http://b",), "OTHER_KEY")


def test_sources_have_the_keys_of_the_teacher_unless_they_set_their_own() -> None:
    teacher = {"url": "http://a", "timeout": 5.0, "api_key": "KEY", "sources": {"gsm8k/main": {"url": "http://b"}}}
    default, own = read(teacher=teacher).teachers.values()
    assert (default.urls, own.urls) == (("http://a",), ("http://b",))
    assert (own.timeout, own.api_key) == (default.timeout, default.api_key) == (5.0, "KEY")
    assert list(read(teacher={"sources": {"math": URL}}).teachers) == ["math"]


@pytest.mark.parametrize(
    ("teacher", "key"),
    [
        ({"api_key": "sk-very-secret-1"}, "opd.teacher.api_key"),
        ({"headers": {"X-Team": "very-secret 1"}}, "opd.teacher.headers"),
        ({"sources": {"math": {"api_key": "very-secret!", "url": "http://b"}}}, "opd.teacher.sources.math.api_key"),
    ],
)
def test_a_secret_in_the_config_is_refused_and_not_said(teacher: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError, match="the environment variable") as caught:
        read(teacher=URL | teacher)
    assert caught.value.problem.key == key
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (
            {"teacher": URL | {"sources": {"math": {"url": "http://b", "timeout": -1}}}},
            "opd.teacher.sources.math.timeout",
        ),
        ({"teacher": URL | {"sources": {"math": {"url": "http://b", "modle": "m"}}}}, "opd.teacher.sources.math.modle"),
        ({"teacher": URL | {"sources": {"math": {"model": "m"}}}}, "opd.teacher.sources.math"),
        ({"teacher": {"url": "http://[::1"}}, "opd.teacher.url"),
        ({"teacher": {"url": ["http://a:1", "http://b:99999"]}}, "opd.teacher.url"),
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
