"""Rules of what extensions read from a batch and send with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.extensions.batch_view import check_columns, last_outputs, read_plain


def test_a_session_counts_once_by_its_last_row() -> None:
    batch: Any = SimpleNamespace(sessions=["a", "b", "a", "c", "b"])
    assert last_outputs(batch) == [2, 4, 3]


def test_columns_have_our_prefix_and_a_value_for_each_row() -> None:
    check_columns({"offpolicy_teacher": torch.zeros(3, 5), "offpolicy_score": torch.zeros(3)}, 3)
    with pytest.raises(ValueError, match="Fix: name the column offpolicy_teacher"):
        check_columns({"teacher": torch.zeros(3)}, 3)
    with pytest.raises(ValueError, match="offpolicy_teacher has 2 rows, but the batch has 3"):
        check_columns({"offpolicy_teacher": torch.zeros(2)}, 3)


@pytest.mark.parametrize(
    "column",
    [NonTensorStack("math", "code"), ["math", "code"], list(np.array(["math", "code"]))],
    ids=["TransferQueue", "objects", "numpy"],
)
def test_a_column_that_is_no_tensor_is_plain(column: Any) -> None:
    class View:
        def rows(self, *names: str) -> dict[str, Any]:
            return {name: list(TensorDict({name: column}, 2)[name]) if wrapped else column for name in names}

    wrapped = isinstance(column, NonTensorStack)
    view: Any = View()
    assert [str(each) for each in read_plain(view, "data_source")] == ["math", "code"]
