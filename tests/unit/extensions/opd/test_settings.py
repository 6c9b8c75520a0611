"""The section ``opd``: what it means."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from tests.support.applications import application

URL = {"url": "http://127.0.0.1:8100"}


def read(**values: Any) -> OpdSettings:
    return OpdSettings.from_mapping("opd", {"mode": "advantage", "teacher": URL} | values)


def test_the_shipped_options_are_the_defaults_of_the_code() -> None:
    for mode, coef in (("advantage", 1.0), ("loss", 0.01)):
        with application(f"opd={mode}", "opd.teacher.url=http://127.0.0.1:8100") as config:
            from omegaconf import OmegaConf

            values: Any = OmegaConf.to_container(config.opd)
        assert OpdSettings.from_mapping("opd", values) == read(mode=mode)
        assert read(mode=mode).coef == coef


def test_addresses_are_one_or_several_with_or_without_v1() -> None:
    assert read(teacher={"url": "http://a:1/v1/"}).teacher.urls == ("http://a:1",)
    assert read(teacher={"url": ["http://a:1", "https://b"]}).teacher.urls == ("http://a:1", "https://b")


def test_a_scale_of_advantages_is_none_of_a_loss() -> None:
    with pytest.raises(CheckError) as caught:
        read(mode="loss", scale=2.0)
    (problem,) = caught.value.problems
    assert (problem.key, problem.overrides) == ("opd.scale", ("opd.scale=std",))
