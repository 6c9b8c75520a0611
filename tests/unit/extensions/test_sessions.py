"""Sessions of several rows count once, and prompts keep their identity over steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.extensions.batch_view import (
    check_columns,
    identify_prompts,
    last_outputs,
    read_plain,
    read_sessions,
)
from tests.support.shaped import make_batch


class Outputs:
    """Rows 0 and 1 are outputs of one session."""

    def __init__(self) -> None:
        self._view = make_batch([("a", 3, 0.0), ("a", 2, 1.0), ("a", 4, 0.0), ("b", 5, 1.0)])
        self.sessions = ["x", "x", "y", "z"]
        self.silent = torch.tensor([False, False, False, True])

    def __getattr__(self, name: str) -> object:
        return getattr(self._view, name)


def test_a_session_has_its_last_rows_score_and_all_its_tokens() -> None:
    found = read_sessions(Outputs(), most_tokens=4)  # type: ignore[arg-type]
    assert found.of_row.tolist() == [0, 0, 1, 2]
    assert found.last.tolist() == [1, 2, 3]
    assert found.tokens.tolist() == [5.0, 4.0, 5.0]
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert found.truncated.tolist() == [False, True, True]
    assert found.groups() == {"a": [0, 1]}  # that of b is silent


def test_identity_is_of_the_prompts_tokens() -> None:
    view, later = make_batch([("a", 3, 0.0), ("b", 2, 1.0), ("a", 1, 1.0)]), make_batch([("b", 1, 0.0)], step=9)
    one, two, three = identify_prompts(view, read_sessions(view))
    assert one == three != two
    assert identify_prompts(later, read_sessions(later)) == [two]


# Rules of what extensions read from a batch and send with it


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
