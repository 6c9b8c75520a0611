from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.delivery.delivery_settings import DeliverySettings, find_problems


@pytest.mark.parametrize(
    ("value", "good"), [(1, True), (4, True), (None, True), (0, False), (1.5, False), ("yes", False)]
)
@pytest.mark.parametrize("key", ["sums", "probe"])
def test_values(key: str, value: Any, good: bool) -> None:
    config = OmegaConf.create({"offpolicy": {"delivery": {key: value}}})
    problems = list(find_problems(config))
    assert [problem.key for problem in problems] == ([] if good else [f"offpolicy.delivery.{key}"])


def test_every_synchronisation_by_default() -> None:
    assert DeliverySettings.from_config(OmegaConf.create({"offpolicy": {}})) == DeliverySettings(sums=1, probe=1)
