"""Sessions of several rows count once, and prompts keep their identity over steps."""

from __future__ import annotations

import torch

from recipe.offpolicy.extensions.batch_view import (
    identify_prompts,
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
