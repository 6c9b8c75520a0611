"""The section's values: defaults as shipped, and what cannot be meant is refused with an override that mends it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import yaml

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.extensions.process_reward.settings import ProcessSettings
from tests.support.paths import ROOT


def test_the_shipped_section_holds_the_defaults() -> None:
    shipped = yaml.safe_load((ROOT / "configs" / "process_reward" / "prefix_value.yaml").read_text())
    assert ProcessSettings.from_mapping("process_reward", shipped) == ProcessSettings()
    assert set(shipped) == set(asdict(ProcessSettings()))


@pytest.mark.parametrize(
    ("key", "value", "override"),
    [
        ("force_prompt", "", 'process_reward.force_prompt="</think>\n\nThe answer is "'),
        ("markers", ["So ", ""], None),
        ("max_tokens", 0, "process_reward.max_tokens=256"),
        ("max_episodes", 1.5, "process_reward.max_episodes=16"),
        ("max_answers", True, "process_reward.max_answers=4"),
        ("floor", 0.0, "process_reward.floor=-20.0"),
        ("prefix_cache", "on", "process_reward.prefix_cache=auto"),
        ("normalize", "mean", "process_reward.normalize=zscore"),
        ("coef", 0, "process_reward.coef=1.0"),
        ("max_unscored_share", 1.0, "process_reward.max_unscored_share=0.0"),
        ("max_token", 99, "process_reward.max_tokens=99"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(key: str, value: Any, override: str | None) -> None:
    with pytest.raises(SpecError) as raised:
        ProcessSettings.from_mapping("process_reward", {key: value})
    assert raised.value.problem.key == f"process_reward.{key}"
    assert override in (None, *raised.value.problem.overrides)
    assert raised.value.problem.overrides
