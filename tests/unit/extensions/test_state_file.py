"""An extension's state comes back from its file, or a resume stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.extensions.add_on import read_state, write_state
from recipe.offpolicy.fault_tolerance.state_schema import NUMBER, CheckpointError, Items, Named


def test_a_state_comes_back(tmp_path: Path) -> None:
    write_state(tmp_path / "new", "rates.json", {"a": [1, 0.5]})
    assert read_state(tmp_path / "new", "rates.json", "pass_at_k", "1 prompts", Named(Items(NUMBER))) == {"a": [1, 0.5]}


def test_a_lost_file_is_named_with_its_content(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"pass_at_k: the checkpoint records 7 prompts, but .*rates\.json is missing"
    ):
        read_state(tmp_path, "rates.json", "pass_at_k", "7 prompts", Named(NUMBER))
