"""An extension's state comes back from its file, or a resume stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.extensions.add_on import read_state, write_state
from recipe.offpolicy.fault_tolerance.state_schema import NUMBER, CheckpointError, Items, Named


def test_a_state_comes_back(tmp_path: Path) -> None:
    write_state(tmp_path / "new", "rates.json", {"a": [1, 0.5]})
    schema = Named(Items(NUMBER))
    assert read_state(tmp_path / "new", "rates.json", "pass_at_k", schema, "a", 2) == {"a": [1, 0.5]}
    with pytest.raises(CheckpointError, match="the checkpoint records 3 rates"):
        read_state(tmp_path / "new", "rates.json", "pass_at_k", schema, "a", 3)


def test_a_lost_file_is_named_with_its_content(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"pass_at_k: the checkpoint records 7 rates, but .*rates\.json is missing"
    ):
        read_state(tmp_path, "rates.json", "pass_at_k", Named(NUMBER), "a", 7)
