"""Settings of the support as a configuration has them."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.support.support_settings import SupportSettings, choose_size


def read(rollout: dict[str, Any], **correction: Any) -> SupportSettings | None:
    return SupportSettings.from_config(
        OmegaConf.create({"correction": correction, "actor_rollout_ref": {"rollout": rollout}})
    )


def test_nothing_is_replayed_where_nothing_is_said() -> None:
    assert read({"top_k": 5}) is None
    assert read({"top_k": 5}, support=None) is None


@pytest.mark.parametrize(("top_k", "size"), [(5, 9), (-1, 32), (0, 32), (None, 32)])
def test_the_number_of_ids_goes_by_top_k(top_k: int | None, size: int) -> None:
    assert choose_size(top_k) == size
    assert read({"top_k": top_k}, support="engine") == SupportSettings(size, "mask", None)


def test_what_is_set_is_taken() -> None:
    found = read({"top_k": 5}, support="engine", support_size=20, support_unknown="full", support_min_p=0.1)
    assert found == SupportSettings(20, "full", 0.1)
