"""Rows packed end to end are decided and measured as padded ones are, and are never padded on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import BatchSplit, build_row_columns, compute_constants, regroup_without_rejected
from recipe.offpolicy.correction import (
    CorrectionSpec,
    rollout_stage,
    step_stage,
    turns,
)
from tests.support.corrections import GSM, M2PO, TIS, band, opsm, spec
from tests.support.drawn import Rows, batches, corrections, examples
from tests.support.packed import NAMES, both_stages, noisy, pack, packed
from tests.support.presets import PRESETS

STAGE = ("weight", "keep", "log_ratio", "valid", "decided", "response_mask")


@pytest.fixture(autouse=True)
def nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("rows were padded")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to_padded_tensor", refuse)
        patched.setattr(torch.nested, "to_padded_tensor", refuse)
        yield


def lengths_of(mask: Tensor, spare: list[int]) -> list[int]:
    """Up to each row's last response token, and ``spare`` tokens more where the row is wide enough."""
    last = [max((t + 1 for t, there in enumerate(row) if there), default=0) for row in mask.tolist()]
    return [min(length + more, mask.shape[1]) for length, more in zip(last, spare, strict=False)]


def same(correction: CorrectionSpec, rows: Rows, lengths: list[int], **options: Any) -> None:
    """To the bit where sums are exact; statistics to 1e-12."""
    stage, step = both_stages(correction, rows, **options)
    packed_stage, packed_step = both_stages(correction, pack(rows, lengths), **options)
    for one, two, names in ((stage, packed_stage, STAGE), (step, packed_step, ("weight", "keep"))):
        for name in names:
            found = getattr(two, name)
            assert found.is_nested, name
            torch.testing.assert_close(
                found.values(), packed(getattr(one, name), lengths).values(), rtol=1e-12, atol=0.0, equal_nan=True
            )
        assert one.rejected.keys() == two.rejected.keys()
        there = packed(stage.valid, lengths).values()
        for key, drop in one.rejected.items():
            assert torch.equal(two.rejected[key].values() & there, packed(drop, lengths).values() & there), key
    assert step.statistics.keys() == packed_step.statistics.keys()
    for name, statistic in step.statistics.items():
        parts = [float(part) for part in packed_step.statistics[name].parts]
        expected = [float(part) for part in statistic.parts]
        # Nearly all are equal to the bit, and ``approx`` would take half of the test's time.
        assert parts == expected or parts == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True), name


@examples
@given(corrections(), batches(), draw.lists(draw.integers(0, 3), min_size=12, max_size=12), draw.booleans())
def test_any_correction(correction: CorrectionSpec, rows: Rows, spare: list[int], aged: bool) -> None:
    """Holes, empty rows, tokens without mu, all levels."""
    staleness = torch.arange(len(rows.mask)) % 5 if aged else None
    same(correction, rows, lengths_of(rows.mask, spare), staleness=staleness)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
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


def test_staleness_by_token() -> None:
    rows, lengths = noisy()
    ages = torch.arange(rows.mask.numel()).reshape(rows.mask.shape) % 5
    padded = both_stages(EVERY_LEVEL[0], rows, staleness=ages)[1].statistics
    nested = both_stages(EVERY_LEVEL[0], pack(rows, lengths), staleness=packed(ages, lengths))[1].statistics
    names = [name for name in padded if name.startswith("staleness/")]
    assert len(names) == 14
    for name in names:
        assert nested[name].value() == pytest.approx(padded[name].value(), nan_ok=True), name


def test_decisions_by_age() -> None:
    """Ages of 0 to 4, by token and by row."""
    rows, lengths = noisy()
    by_token = torch.arange(rows.mask.numel()).reshape(rows.mask.shape) % 5
    by_row = (torch.arange(len(lengths)) + 1) % 5
    for level in ("token", "sequence", "turn", "version"):
        factors = {"level": level, "by_staleness": [1.0, 2.0, 0.5]}
        stale = {"aggregate": "staleness", "level": level, "upper": 2}
        correction = spec(TIS | factors | {"upper": 1.02}, any=band(0.9, 1.1, aggregate="any", **factors), stale=stale)
        for ages, same_packed in ((by_token, packed(by_token, lengths)), (by_row, by_row)):
            step = both_stages(correction, rows, staleness=ages)[1]
            nested = both_stages(correction, pack(rows, lengths), staleness=same_packed)[1]
            weight = packed(step.weight, lengths).values()
            torch.testing.assert_close(nested.weight.values(), weight, rtol=1e-12, atol=0.0)
            assert torch.equal(nested.keep.values(), packed(step.keep, lengths).values())
            assert step.rejected["masks.stale"].any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_of_nothing(lengths: list[int]) -> None:
    empty = torch.zeros(len(lengths), 0)
    rows = Rows(**dict.fromkeys(NAMES, empty))
    for correction in EVERY_LEVEL:
        same(correction, replace(rows, mask=empty.bool(), turns=empty.long(), versions=empty.long()), lengths)


@pytest.mark.parametrize("level", ["token", "sequence", "turn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_against_float64(level: str, dtype: torch.dtype) -> None:
    """Rows of 32768, 1 and 20000 tokens; sums by math.fsum over the log-probs as they are given."""
    generator = torch.Generator().manual_seed(4)
    lengths = [32768, 1, 20000]
    mu = (-2 * torch.rand(sum(lengths), generator=generator)).to(dtype)
    old = (mu.double() + 0.01 * torch.randn(len(mu), generator=generator, dtype=torch.float64)).to(dtype)
    old, mu = (torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, *lengths]).cumsum(0)) for x in (old, mu))
    mask = torch.ones_like(mu, dtype=torch.bool)
    weight = TIS | {"level": level, "upper": None, "aggregate": "product" if level == "token" else "geometric"}
    stage = rollout_stage(
        spec(weight), old_log_prob=old, rollout_log_prob=mu, response_mask=mask, segment_ids=turns(mask)
    )
    for got, one, two in zip(stage.weight.unbind(), old.unbind(), mu.unbind(), strict=True):
        logs = [a - b for a, b in zip(one.double().tolist(), two.double().tolist(), strict=True)]
        want = logs if level == "token" else [math.fsum(logs) / len(logs)] * len(logs)
        torch.testing.assert_close(got.double(), torch.tensor(want).double().exp(), rtol=1e-6, atol=0.0)
    logs = [a - b for a, b in zip(old.values().double().tolist(), mu.values().double().tolist(), strict=True)]
    parts = stage.statistics["kl/k1"].parts
    assert float(parts[0]) == pytest.approx(-math.fsum(logs), rel=1e-9)


# The plan of a batch ----------------------------------------------------------------------------------------


def stored(rows: Rows, **more: Tensor) -> TensorDict:
    """As verl's V1 trainer stores it."""
    columns = {"response_mask": rows.mask, "old_log_probs": rows.old, "rollout_log_probs": rows.mu}
    return TensorDict(columns | more, batch_size=[9])


@pytest.mark.parametrize("level", ["token", "sequence", "turn", "version"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_plan_is_made_without_padding(level: str, mode: str) -> None:
    """The mean weight, M2PO's cut, the groups of the baseline and the columns of the denominator."""
    rows, lengths = noisy()
    rows.old[:] = torch.where(torch.arange(9)[:, None] == 6, rows.mu - 1.0, rows.old)
    reject = {"kind": "reject", "level": level, "lower": 0.8, "upper": 1.2, "normalize": True}
    correction = CorrectionSpec.from_mapping(
        {"weight": reject, "masks": {"m2po": M2PO, "gsm": GSM | {"lower": 0.9, "upper": 1.1}}, "denominator": "kept"}
    )
    versions = torch.arange(9)[:, None].expand(9, 2) // 2
    plans = []
    for batch in (stored(rows, offpolicy_versions=versions), stored(pack(rows, lengths), offpolicy_versions=versions)):
        constants = compute_constants(correction, batch)
        one = CorrectionSpec.from_mapping({"masks": {"gsm": GSM | {"lower": 0.9, "upper": 1.1, "level": level}}})
        groups = regroup_without_rejected(one, batch, [f"prompt {i // 3}" for i in range(9)])
        columns = build_row_columns(replace(one, denominator="kept"), batch, BatchSplit(1, 3, mode))
        plans.append((constants, groups, columns))
    (constants, groups, columns), (packed_constants, packed_groups, packed_columns) = plans
    assert packed_constants.weight_mean == pytest.approx(constants.weight_mean, rel=1e-12)
    assert packed_constants.cutoffs == constants.cutoffs
    assert packed_groups == groups
    assert groups.metrics["offpolicy/baseline/excluded_sequences"] > 0
    assert columns.keys() == packed_columns.keys() == {"offpolicy_scale", "offpolicy_mini_batch_tokens"}
    assert columns["offpolicy_scale"].max() > 1
    for key, column in columns.items():
        assert torch.equal(packed_columns[key], column), key


# What cannot be read ----------------------------------------------------------------------------------------


ROWS = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ROWS, "rollout_log_prob, response_mask are nested, old_log_prob are not.*torch.jagged"),
        (packed(ROWS, [1, 2, 2]), r"rows of \w+ \(3 of 4 tokens in all\) are not as long as those of \w+ \(3 of 5\)|"
         r"rows of \w+ \(3 of 5"),
        (packed(ROWS, [1, 2, 1]), "are not as long as"),
        (packed(ROWS[:2], [2, 2]), "are not as long as"),
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
    """As they are once rows have been through a store, or on their own way to the device."""
    rows = [packed(torch.zeros(3, 2), [2, 1, 1]) for _ in range(4)]
    assert len({id(one.offsets()) for one in rows}) == 4
    stage = rollout_stage(
        spec(opsm=opsm(0.1)), old_log_prob=rows[0], rollout_log_prob=rows[1], response_mask=rows[2] + 1
    )
    assert step_stage(spec(opsm=opsm(0.1)), stage, log_prob=rows[3], advantages=rows[0]).keep.values().all()


def test_answers_know_their_longest_row() -> None:
    """torch pads a nested tensor that does not to the number of all tokens."""
    rows, lengths = noisy()
    stage, step = both_stages(spec(TIS), pack(rows, lengths))
    for answer in (stage.weight, step.keep, turns(packed(rows.mask, lengths))):
        assert answer._get_max_seqlen() == max(lengths) < sum(lengths)
