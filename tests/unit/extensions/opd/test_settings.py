"""The section ``opd``: what it means, and what is refused with a fix that works."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import SpecError
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


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({"teacher": {}}, "opd.teacher.url", "Start one with scripts/teacher.sh"),
        ({"teacher": {"url": "localhost:8100"}}, "opd.teacher.url", "opd.teacher.url=http://127.0.0.1:8100"),
        ({"teacher": {"url": []}}, "opd.teacher.url", "opd.teacher.url="),
        ({"teacher": URL | {"retries": -1}}, "opd.teacher.retries", "opd.teacher.retries=2"),
        ({"mode": "k1"}, "opd.mode", "opd.mode=advantage"),
        ({"coeff": 1.0}, "opd.coeff", "Did you mean opd.coef?"),
        ({"coef": 0}, "opd.coef", "opd.coef=null"),
        ({"max_gap": None}, "opd.max_gap", "opd.max_gap=5.0"),
        ({"horizon": 0}, "opd.horizon", "opd.horizon=null"),
        ({"scale": "mean"}, "opd.scale", "opd.scale=std"),
        ({"eligible": {"max_pass_rate": 2}}, "opd.eligible.max_pass_rate", "opd.eligible.max_pass_rate=0.25"),
        ({"eligible": {"rows": "some"}}, "opd.eligible.rows", "opd.eligible.rows=failed"),
        ({"eligible": 3}, "opd.eligible", "opd.eligible"),
        ({"corrected": False}, "opd.corrected", "opd.corrected=true"),
        ({"mode": "loss", "scale": 2.0}, "opd.scale", "opd.scale=std"),
    ],
)
def test_what_is_refused_names_its_key_and_a_fix(values: dict[str, Any], key: str, fix: str) -> None:
    with pytest.raises(SpecError) as error:
        read(**values)
    assert error.value.problem.key == key
    assert fix in error.value.problem.advice


def test_a_mode_has_to_be_chosen() -> None:
    with pytest.raises(SpecError, match=r"Set opd=advantage or opd=loss"):
        OpdSettings.from_mapping("opd", {"teacher": URL})
