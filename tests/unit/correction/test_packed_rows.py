"""Rows packed end to end get the same decisions and statistics as padded rows, and blocks of rows add up to
the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from recipe.offpolicy.correction.row_layout import detect_layout, split_tokens
from tests.support.corrections import TIS, band, opsm, spec
from tests.support.drawn import Rows, batches, corrections, examples
from tests.support.examples import each_nth_by_default
from tests.support.packed import NAMES, both_stages, noisy, pack, packed
from tests.support.presets import PRESETS

OUT, INNER = ("weight", "keep"), ("log_ratio", "decided")


@pytest.fixture(autouse=True)
def nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("rows were padded")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to_padded_tensor", refuse)
        patched.setattr(torch.nested, "to_padded_tensor", refuse)
        yield


def lengths_of(mask: Tensor, spare: list[int]) -> list[int]:
    """Lengths up to each row's last response token, plus ``spare`` tokens where the row is wide enough."""
    last = [max((t + 1 for t, there in enumerate(row) if there), default=0) for row in mask.tolist()]
    return [min(length + more, mask.shape[1]) for length, more in zip(last, spare, strict=False)]


def same(correction: CorrectionSpec, rows: Rows, lengths: list[int], ages: Tensor | None = None) -> None:
    """Compare bitwise where sums are exact; statistics to 1e-12."""
    stage, step = both_stages(correction, rows, staleness=ages)
    packed_ages = packed(ages, lengths) if ages is not None and ages.dim() == 2 else ages
    packed_stage, packed_step = both_stages(correction, pack(rows, lengths), staleness=packed_ages)
    pairs = [
        (getattr(packed_each, name), getattr(each, name))
        for each, packed_each, names in ((stage, packed_stage, ("weight", "keep", "valid")), (step, packed_step, OUT))
        for name in names
    ]
    assert all(found.is_nested for found, _ in pairs)
    of_tokens = [(getattr(packed_stage.decisions, name), getattr(stage.decisions, name)) for name in INNER]
    for found, whole in [(found.values(), whole) for found, whole in pairs] + of_tokens:
        torch.testing.assert_close(found, packed(whole, lengths).values(), rtol=1e-12, atol=0.0, equal_nan=True)
    assert step.rejected.keys() == packed_step.rejected.keys()
    there = packed(stage.valid, lengths).values()
    for key, drop in step.rejected.items():
        assert torch.equal(packed_step.rejected[key].values() & there, packed(drop, lengths).values() & there), key
    assert step.statistics.keys() == packed_step.statistics.keys()
    for name, statistic in step.statistics.items():
        parts = [float(part) for part in packed_step.statistics[name].parts]
        expected = [float(part) for part in statistic.parts]
        # Nearly all are equal to the bit, and ``approx`` would take half of the test's time.
        assert parts == expected or parts == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True), name


@examples
@given(corrections(by_age=True), batches(), draw.lists(draw.integers(0, 3), min_size=12, max_size=12), draw.booleans())
def test_any_correction(correction: CorrectionSpec, rows: Rows, spare: list[int], by_token: bool) -> None:
    """Holes, empty rows, tokens without mu, all levels, and ages of 0 to 4, per token and per row."""
    lengths = lengths_of(rows.mask, spare)
    ages = (
        (torch.arange(rows.mask.numel()) % 5).reshape(rows.mask.shape) if by_token else torch.arange(len(lengths)) % 5
    )
    same(correction, rows, lengths, ages)


@pytest.mark.parametrize(
    ("name", "dtype"), each_nth_by_default(3, itertools.product(sorted(PRESETS), (torch.float64, torch.bfloat16)))
)
def test_every_preset(name: str, dtype: torch.dtype) -> None:
    rows, lengths = noisy()
    same(PRESETS[name], rows.to(dtype), lengths)


EVERY_LEVEL = [
    spec(
        TIS | {"level": level, "normalize": True, "kind": "reject", "lower": 0.7},
        mean=band(0.98, 1.02, level=level),
        any=band(0.9, 1.1, level=level, aggregate="any"),
        shift=band(None, 0.05, level=level, aggregate="binary_tv", ratio="full", when="negative"),
        k3=band(None, 0.01, level=level, aggregate="k3_max", ratio="ppo", when="positive", sign="token"),
    )
    for level in ("token", "sequence", "turn", "version")
]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_of_nothing(lengths: list[int]) -> None:
    empty = torch.zeros(len(lengths), 0)
    rows = Rows(**dict.fromkeys(NAMES, empty))
    for correction in EVERY_LEVEL:
        same(correction, replace(rows, mask=empty.bool(), turns=empty.long(), versions=empty.long()), lengths)


# What cannot be read ----------------------------------------------------------------------------------------


ROWS = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ROWS, "rollout_log_prob, response_mask are nested, old_log_prob are not.*torch.jagged"),
        (packed(ROWS, [1, 2, 2]), r"rows of \w+ \(3 of 4 tokens in all\) differ in length from those of \w+ \(3 of 5\)|"
         r"rows of \w+ \(3 of 5"),
        (packed(ROWS, [1, 2, 1]), "differ in length from"),
        (packed(ROWS[:2], [2, 2]), "differ in length from"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.strided), "old_log_prob.*strided"),
        (torch.nested.nested_tensor([torch.ones(2, 2)] * 3, layout=torch.jagged), "old_log_prob.*3 dimensions"),
        (
            torch.nested.narrow(ROWS, 1, torch.tensor([0, 0, 0]), torch.tensor([2, 1, 1]), layout=torch.jagged),
            "old_log_prob.*contiguous",
        ),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit(wrong: Tensor, message: str) -> None:
    rows = packed(ROWS, [2, 1, 1])
    with pytest.raises(ValueError, match=message):
        rollout_stage(spec(TIS), old_log_prob=wrong, rollout_log_prob=rows, response_mask=rows)
    stage = rollout_stage(spec(TIS), old_log_prob=rows, rollout_log_prob=rows, response_mask=rows)
    with pytest.raises(ValueError, match=r"nested|not as long"):
        step_stage(spec(TIS), stage, log_prob=wrong)


def test_offsets_may_be_another_tensor_of_the_same_values() -> None:
    """This is the case after rows have been stored, or while they are being moved to the device."""
    rows = [packed(torch.zeros(3, 2), [2, 1, 1]) for _ in range(4)]
    assert len({id(one.offsets()) for one in rows}) == 4
    stage = rollout_stage(
        spec(opsm=opsm(0.1)), old_log_prob=rows[0], rollout_log_prob=rows[1], response_mask=rows[2] + 1
    )
    assert step_stage(spec(opsm=opsm(0.1)), stage, log_prob=rows[3], advantages=rows[0]).keep.values().all()


LENGTHS = draw.lists(draw.integers(0, 5), min_size=1, max_size=12)


@given(LENGTHS, draw.integers(1, 12))
def test_blocks_of_nested_rows(lengths: list[int], most: int) -> None:
    """The blocks are in order, each is as large as allowed, and each contains its own rows."""
    values = torch.arange(60).reshape(12, 5)[: len(lengths)]
    column = packed(values, lengths)
    blocks = list(split_tokens({"one": column, "other": column + 100}, most))
    assert [row for at, _, _ in blocks for row in range(at.start, at.stop)] == list(range(len(lengths)))
    assert torch.equal(torch.cat([tokens["one"] for _, _, tokens in blocks]), column.values())
    of_rows = torch.cat([rows.sum(tokens["one"]) for _, rows, tokens in blocks])
    assert torch.equal(of_rows, detect_layout(column=column).sum(column.values()))
    for (at, rows, tokens), following in zip(blocks, [*blocks[1:], None], strict=True):
        number = len(tokens["one"])
        assert (rows.count, number) == (at.stop - at.start, sum(lengths[at]))
        assert number <= most or rows.count == 1
        assert following is None or number + lengths[following[0].start] > most
        assert torch.equal(tokens["other"], tokens["one"] + 100)
