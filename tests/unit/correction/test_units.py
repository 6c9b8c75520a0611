"""Units: which tokens of a row share a weight or a decision, and what turns and versions make of both."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.correction import turns
from recipe.offpolicy.correction.units import Units, partition_units
from tests.support.corrections import TIS, band, opsm, run, spec, tensor, values

LOG = math.log
INF = math.inf
VALUES = tensor([[1.0, 2.0, 0.0, 4.0], [8.0, 0.0, 0.0, 0.0], [0.0] * 4])
VALID = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
IDS = torch.tensor([[5, 9, 9, 5], [7, 7, 7, 7], [0, 1, 2, 3]])


def units(level: str) -> Units:
    return partition_units(level, VALID, IDS)  # type: ignore[arg-type]


# A partition of the valid tokens ----------------------------------------------------------------------------


def test_by_sequence() -> None:
    unit = units("sequence")
    assert unit.tokens.shape == (3, 1)
    assert unit.total(VALUES).tolist() == [[7.0], [8.0], [0.0]]
    assert unit.mean(VALUES).tolist() == [[7 / 3], [8.0], [0.0]]
    assert unit.greatest(VALUES).tolist() == [[4.0], [8.0], [-INF]]
    assert unit.tokens.tolist() == [[3.0], [1.0], [0.0]]
    assert unit.spread(tensor([[1.0], [2.0], [3.0]])).tolist() == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_by_token() -> None:
    unit = units("token")
    assert unit.tokens.shape == (3, 4)
    assert unit.total(VALUES).tolist() == unit.mean(VALUES).tolist() == VALUES.tolist()
    assert unit.greatest(VALUES).tolist() == [[1.0, 2.0, -INF, 4.0], [8.0, -INF, -INF, -INF], [-INF] * 4]
    assert unit.tokens.tolist() == VALID.double().tolist()
    assert unit.spread(VALUES).tolist() == VALUES.tolist()


@pytest.mark.parametrize("level", ["turn", "version"])
def test_by_ids(level: str) -> None:
    """Row 0: ids 5 (tokens 0 and 3) and 9 (token 1); the tool token's 9 is of no unit. The other rows: one and none."""
    unit = units(level)
    there = unit.tokens > 0
    assert there.sum(-1).tolist() == [2, 1, 0]
    assert unit.total(VALUES)[there].tolist() == [5.0, 2.0, 8.0]
    assert unit.mean(VALUES)[there].tolist() == [2.5, 2.0, 8.0]
    assert unit.greatest(VALUES)[there].tolist() == [4.0, 2.0, 8.0]
    assert unit.tokens[there].tolist() == [2.0, 1.0, 1.0]
    assert not unit.total(VALUES)[~there].any()
    assert not unit.mean(VALUES)[~there].any()
    assert (unit.greatest(VALUES)[~there] == -INF).all()
    spread = unit.spread(unit.total(VALUES))
    assert torch.where(VALID, spread, 0.0).tolist() == [[5.0, 2.0, 0.0, 5.0], [8.0, 0.0, 0.0, 0.0], [0.0] * 4]


def test_the_greatest_of_negative_numbers() -> None:
    """Tokens that do not count, 0 here, are not the greatest."""
    for level in ("sequence", "turn"):
        unit = units(level)
        assert unit.greatest(-VALUES - 1)[unit.tokens > 0][0].item() == -2.0


def test_values_off_the_mask_are_no_maximum() -> None:
    junk = torch.where(VALID, VALUES, math.nan)
    for level in ("token", "sequence", "turn"):
        assert torch.equal(units(level).greatest(junk), units(level).greatest(VALUES))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_ids_of_any_integer_type_and_size(dtype: torch.dtype) -> None:
    """The least and greatest number of the type are names like others; so is the one that stands on padding."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[high, low, high, 0, low]], dtype=dtype)
    valid = torch.tensor([[True, True, False, True, True]])
    unit = partition_units("version", valid, ids)
    total = unit.total(tensor([[1.0, 10.0, 0.0, 100.0, 1000.0]]))
    assert total[unit.tokens > 0].tolist() == [1010.0, 100.0, 1.0]


def test_ids_off_the_mask_make_no_unit() -> None:
    """Neither below nor above the one that counts."""
    unit = partition_units("turn", torch.tensor([[False, True, False]]), torch.tensor([[1, 5, 9]]))
    assert unit.tokens.sum() == (unit.tokens > 0).sum() == 1


@pytest.mark.parametrize("level", ["token", "sequence", "turn", "version"])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_without_tokens(level: str, shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    unit = partition_units(level, empty.bool(), empty.long())  # type: ignore[arg-type]
    assert unit.spread(unit.total(empty)).shape == unit.spread(unit.greatest(empty)).shape == shape
    assert unit.mean(empty).shape == unit.tokens.shape


def test_sums_are_in_float64() -> None:
    """2^24 + 1 in float32 is 2^24."""
    values = tensor([[2.0**24, 1.0, 1.0]])
    for level in ("sequence", "turn"):
        unit = partition_units(level, torch.ones(1, 3).bool(), torch.zeros(1, 3).long())
        assert unit.total(values).max().item() == 2.0**24 + 2


# Turns from the response mask -------------------------------------------------------------------------------


def test_turns_are_the_runs_of_the_response_mask() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [0, 0, 1, 0, 1, 1, 0, 0], [1] * 8, [0] * 8])
    found = turns(mask)
    assert found.dtype is torch.int64
    seen = [[turn for turn, valid in zip(*row, strict=True) if valid] for row in zip(found.tolist(), mask, strict=True)]
    assert seen == [[0, 0, 1, 2, 2], [0, 1, 1], [0] * 8, []]
    assert (found >= 0).all()


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_turns_of_any_type_of_mask(kind: torch.dtype) -> None:
    assert turns(torch.tensor([[1, 0, 1]]).to(kind))[0, ::2].tolist() == [0, 1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_turns_of_nothing(shape: tuple[int, int]) -> None:
    assert turns(torch.zeros(shape)).shape == shape


def test_a_token_without_mu_does_not_end_a_turn() -> None:
    """Turns follow the response mask: without mu the middle token is no factor, but 2 x 3 are still of one turn."""
    mask = torch.ones(1, 3)
    rows = dict(mu=[[0.0, math.nan, 0.0]], old=[[LOG(2), 0.0, LOG(3)]], turns=turns(mask))
    step = run(spec(TIS | {"level": "turn", "upper": None}), **rows)
    assert step.weight.tolist() == [pytest.approx([6.0, 0.0, 6.0], rel=1e-6)]


# Two turns, the second of them far off ----------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 0, 1, 1]])
TWO_TURNS = dict(
    mu=[[0.0] * 5], old=[[LOG(1.1), LOG(1.2), 9.0, LOG(2), LOG(3)]], mask=MASK, turns=turns(MASK), versions=[[3] * 5]
)


def test_a_weight_by_turn() -> None:
    """Products 1.1 x 1.2 = 1.32 and 2 x 3 = 6 -> 5; geometric 1.1489 and 2.4495; by sequence 7.92."""
    kind = TIS | {"level": "turn", "upper": 5.0}
    assert run(spec(kind), **TWO_TURNS).weight.tolist() == [pytest.approx([1.32, 1.32, 0.0, 5.0, 5.0], rel=1e-6)]
    step = run(spec(kind | {"aggregate": "geometric"}), **TWO_TURNS)
    first, second = math.sqrt(1.32), math.sqrt(6)
    assert step.weight.tolist() == [pytest.approx([first, first, 0.0, second, second], rel=1e-6)]
    whole = run(spec(kind | {"level": "sequence", "upper": None}), **TWO_TURNS)
    assert whole.weight.tolist() == [pytest.approx([7.92, 7.92, 0.0, 7.92, 7.92], rel=1e-6)]


def test_a_weight_that_rejects_a_turn() -> None:
    step = run(spec(TIS | {"level": "turn", "kind": "reject", "upper": 5.0}), **TWO_TURNS)
    assert step.keep.tolist() == [[True, True, False, False, False]]


@pytest.mark.parametrize("aggregate", ["product", "geometric", "any"])
def test_a_mask_by_turn(aggregate: str) -> None:
    """Both turns and the row as a whole: products 1.32, 6, 7.92; means 1.149, 2.449, 1.678; greatest 1.2, 3."""
    mask = band(None, 1.5, aggregate=aggregate, level="turn")
    assert run(spec(m=mask), **TWO_TURNS).keep.tolist() == [[True, True, False, False, False]]
    assert not run(spec(m=mask | {"level": "sequence"}), **TWO_TURNS).keep.any()
    step = run(spec(m=mask), **TWO_TURNS)
    assert values(step)["mask/m/masked_token_share"] == 0.5
    assert values(step)["mask/m/masked_sequence_share"] == 0.0


def test_divergences_by_turn() -> None:
    """k1 of the first turn: -ln 1.32 = -0.2776 as a sum, half of it as a mean; of the second -1.7918 and -0.8959."""
    for aggregate, lower in (("k1_sum", -0.28), ("k1_mean", -0.14), ("k1_max", -0.1)):
        step = run(spec(m=band(lower, None, aggregate=aggregate, level="turn")), **TWO_TURNS)
        assert step.keep.tolist() == [[True, True, False, False, False]], aggregate
        tighter = run(spec(m=band(lower + 0.01, None, aggregate=aggregate, level="turn")), **TWO_TURNS)
        assert not tighter.keep.any(), aggregate


def test_opsm_by_turn() -> None:
    """Mean log(mu/pi): 0.05 and 0.3; the sign is that of the whole row, or of each token."""
    rows = dict(mu=[[0.0] * 5], old=[[0.0] * 5], pi=[[-0.1, 0.0, 9.0, -0.3, -0.3]], mask=MASK, turns=turns(MASK))
    by_turn = opsm(0.1, level="turn")
    assert run(spec(m=by_turn), **rows, advantages=-1).keep.tolist() == [[True, True, False, False, False]]
    assert run(spec(m=by_turn), **rows, advantages=1).keep.tolist() == [[True, True, False, True, True]]
    # The second turn's own advantages are negative, but the row's mean is positive.
    mixed = [[5.0, 5.0, 0.0, -1.0, 1.0]]
    assert run(spec(m=by_turn), **rows, advantages=mixed).keep.tolist() == [[True, True, False, True, True]]
    by_token = by_turn | {"sign": "token"}
    assert run(spec(m=by_token), **rows, advantages=mixed).keep.tolist() == [[True, True, False, False, True]]


# Two versions of the weights in one row ---------------------------------------------------------------------


def test_a_weight_by_version() -> None:
    """Versions interleave: tokens 0 and 2 of version 4 make 2 x 1.5 = 3, tokens 1 and 3 of version 5 make 0.5 x 0.5."""
    rows = dict(mu=[[0.0] * 4], old=[[LOG(2), LOG(0.5), LOG(1.5), LOG(0.5)]], versions=[[4, 5, 4, 5]])
    step = run(spec(TIS | {"level": "version", "upper": None}), **rows)
    assert step.weight.tolist() == [pytest.approx([3.0, 0.25, 3.0, 0.25], rel=1e-6)]


def test_a_mask_by_version_drops_the_stale_part_of_a_row() -> None:
    """Version 4 has drifted by e^0.3 a token, version 5 by e^0.001; rows of other versions are units of their own."""
    old = [[0.3, 0.3, 0.001, 0.001], [0.001, 0.001, 0.3, 0.3]]
    rows = dict(mu=torch.zeros(2, 4), old=old, versions=[[4, 4, 5, 5], [4, 4, 4, 4]])
    mask = band(0.9, 1.1, level="version")
    assert run(spec(m=mask), **rows).keep.tolist() == [[False, False, True, True], [False] * 4]
    assert not run(spec(m=mask | {"level": "sequence"}), **rows).keep.any()


def test_turns_and_versions_at_once() -> None:
    rows = dict(mu=[[0.0] * 4], old=[[0.3, 0.0, 0.0, 0.0]], turns=[[0, 0, 1, 1]], versions=[[0, 1, 1, 1]])
    by_turn, by_version = band(0.9, 1.1, level="turn"), band(0.9, 1.1, level="version")
    assert run(spec(m=by_turn), **rows).keep.tolist() == [[False, False, True, True]]
    assert run(spec(m=by_version), **rows).keep.tolist() == [[False, True, True, True]]
    assert run(spec(a=by_turn, b=by_version), **rows).keep.tolist() == [[False, False, True, True]]
