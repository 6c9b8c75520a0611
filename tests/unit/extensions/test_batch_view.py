"""Rules of what extensions read from a batch and send with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.offpolicy.extensions.batch_view import check_columns, last_outputs


def test_a_session_counts_once_by_its_last_row() -> None:
    batch: Any = SimpleNamespace(sessions=["a", "b", "a", "c", "b"])
    assert last_outputs(batch) == [2, 4, 3]


def test_columns_have_our_prefix_and_a_value_for_each_row() -> None:
    check_columns({"offpolicy_teacher": torch.zeros(3, 5), "offpolicy_score": torch.zeros(3)}, 3)
    with pytest.raises(ValueError, match="Fix: name the column offpolicy_teacher"):
        check_columns({"teacher": torch.zeros(3)}, 3)
    with pytest.raises(ValueError, match="offpolicy_teacher has 2 rows, but the batch has 3"):
        check_columns({"offpolicy_teacher": torch.zeros(2)}, 3)
