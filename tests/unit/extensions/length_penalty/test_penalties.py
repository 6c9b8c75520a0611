"""Each penalty by hand on one group, and what may not influence it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.length_penalty.penalties import KINDS, penalties

LENGTHS, RIGHT = [100, 200, 400, 500], [True, False, True, False]


@pytest.mark.parametrize(
    ("kind", "coefficient", "anchor", "wanted"),
    [
        ("uniform", 1e-3, None, [0.1, 0.2, 0.4, 0.5]),
        # lam = 1/2 - (T - 100) / 400 = 0.5, 0.25, -0.25, -0.5; the short wrong row gets nothing.
        ("group", 0.1, None, [-0.05, 0.0, 0.025, 0.05]),
        ("anchor", 0.1, 250, [0.0, 0.0, 0.06, 0.1]),
        ("reference", 0.1, 250, [0.0, 0.0, 0.06, 0.1]),
        ("anchor", 0.1, None, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_by_hand(kind: str, coefficient: float, anchor: float | None, wanted: list[float]) -> None:
    found = penalties(kind, torch.tensor(LENGTHS), torch.tensor(RIGHT), coefficient=coefficient, anchor=anchor)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("lengths", [[7], [7, 7, 7], []])
def test_rows_that_are_alike_get_no_penalty_of_the_group(lengths: list[int]) -> None:
    assert penalties("group", lengths, [1] * len(lengths), coefficient=0.1).tolist() == [0.0] * len(lengths)


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=1, max_size=12))
def test_wrong_rows_never_gain(rows: list[tuple[int, bool]]) -> None:
    lengths, right = (torch.tensor(each) for each in zip(*rows, strict=True))
    for kind in KINDS:
        found = penalties(kind, lengths, right, coefficient=0.1, anchor=100.0)
        assert all(value >= 0 for value, mark in zip(found.tolist(), right.tolist(), strict=True) if not mark)
        if kind != "group":
            assert bool((found >= 0).all())


@pytest.mark.parametrize(
    ("kind", "lengths", "right", "coefficient", "anchor", "said"),
    [
        ("cosine", [1], [1], 0.1, None, "kind=cosine"),
        ("uniform", [1, 2], [1], 0.1, None, "one of each"),
        ("uniform", [float("nan")], [1], 0.1, None, "0 tokens or more"),
        ("uniform", [1], [0.5], 0.1, None, r"1 \(correct\) or 0 \(wrong\)"),
        ("uniform", [1], [1], -0.1, None, "coefficient=-0.1"),
        ("anchor", [1], [1], 0.1, 0, "anchor=0"),
    ],
)
def test_bad_input_is_an_error(
    kind: str, lengths: list[float], right: list[float], coefficient: float, anchor: float | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        penalties(kind, lengths, right, coefficient=coefficient, anchor=anchor)  # type: ignore[arg-type]
