"""A seal distinguishes a column from one with any other value, order or row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.micro_batch import MicroBatch, check_engine, check_seals, read
from recipe.offpolicy.batch.padding import take_rows
from recipe.offpolicy.batch.plan import SharedPlan, seal_batch
from recipe.offpolicy.batch.seals import SealError, build_seals, compare, key_of, seal_constant
from recipe.offpolicy.correction.statistics import fetch
from tests.support.packed import packed

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4], [9, 9, 9, 9]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
BY_TOKEN = {
    "old_log_probs": -torch.arange(1.0, 17.0).view(4, 4) / 3,
    "advantages": torch.tensor([[1.0], [-1.0], [5.0], [0.5]]).expand(4, 4).contiguous(),
}
BY_ROW = {
    "scale": torch.tensor([1.0, 2.0, 3.0, 4.0]).double(),
    "versions": torch.tensor([[3, 4], [4, 4], [0, 0], [5, 5]]),
}
PLAN = 77


def check(changed: dict[str, Tensor], *, plan: int = PLAN, seals: dict[str, Tensor] | None = None) -> None:
    """Compare the columns, some of them changed, with the seals of the original columns."""
    if seals is None:
        seals = build_seals(TOKENS, MASK, {**BY_TOKEN, **BY_ROW}) | {"plan": seal_constant(PLAN, 4)}
    by_token = {name: changed.get(name, column) for name, column in BY_TOKEN.items()}
    by_row = {name: changed.get(name, column) for name, column in BY_ROW.items()}
    fetch([compare(seals, tokens=TOKENS, mask=MASK, by_token=by_token, by_row=by_row, plan=plan)])


def test_untouched_columns_pass_and_rows_without_a_token_are_not_read() -> None:
    check({})
    check({name: torch.where(MASK.bool(), column, torch.nan) for name, column in BY_TOKEN.items()})
    scale = BY_ROW["scale"].clone()
    scale[2] = 7.0
    check({"scale": scale})


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "permuted": lambda column: column.roll(1, 0),
    "shifted": lambda column: column.roll(1, 1),
    "sign": torch.neg,
    "one ulp": lambda column: torch.nextafter(column, torch.full((), 9.0)),
    "nan": lambda column: torch.full_like(column, torch.nan),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", BY_TOKEN)
def test_each_change_of_a_column_is_named(name: str, change: str) -> None:
    changed = CHANGES[change](BY_TOKEN[name])
    if torch.equal(changed * MASK, BY_TOKEN[name] * MASK):
        pytest.skip("the same for every token that is read")
    with pytest.raises(SealError, match=rf"^{name} changed .* sequences of the micro-batch\. Sequence \d"):
        check({name: changed})


@pytest.mark.parametrize("name", BY_ROW)
def test_each_change_of_a_column_by_row_is_named(name: str) -> None:
    with pytest.raises(SealError, match=f"^{name} changed .* in 3 of 4 sequences"):
        check({name: BY_ROW[name] + 1})


def test_another_plan_and_a_lost_column_are_named() -> None:
    with pytest.raises(SealError, match="the loss received the plan of another update with 3 of 4 sequences"):
        check({}, plan=PLAN + 1)
    seals = build_seals(TOKENS, MASK, {"teacher": BY_TOKEN["advantages"]})
    with pytest.raises(SealError, match="teacher did not reach the loss"):
        check({}, seals=seals)


def test_layouts_have_the_same_seals() -> None:
    mask = MASK.clone()
    mask[1::2, 3] = 0
    padded = build_seals(TOKENS, mask, BY_TOKEN)
    tokens, there, *columns = (packed(each, [4, 3, 4, 3]) for each in (TOKENS, mask, *BY_TOKEN.values()))
    nested = build_seals(tokens, there, dict(zip(BY_TOKEN, columns, strict=True)))
    assert all(torch.equal(nested[name][mask.any(-1)], padded[name][mask.any(-1)]) for name in BY_TOKEN)


def micro_batch(**changed: Tensor) -> MicroBatch:
    """The original columns with their seals, as a loss reads them."""
    columns = {
        "responses": TOKENS,
        "response_mask": MASK,
        "rollout_log_probs": BY_TOKEN["old_log_probs"] / 2,
        **BY_TOKEN,
    }
    rows = TensorDict({**columns, "offpolicy_teacher": BY_TOKEN["advantages"] / 3}, batch_size=4)
    sealed = {name: rows[name] for name in (*BY_TOKEN, "rollout_log_probs", "offpolicy_teacher")}
    plan = seal_batch(SharedPlan(step=3), rows, sealed)
    rows = rows.update(changed)
    return MicroBatch(
        responses=rows["responses"],
        response_mask=MASK.bool(),
        rollout_log_prob=rows["rollout_log_probs"],
        old_log_prob=rows["old_log_probs"],
        log_prob=rows["old_log_probs"],
        advantages=rows["advantages"],
        plan=plan,
        data=rows,
    )


def test_a_loss_checks_all_that_its_plan_tells_of() -> None:
    untouched = check_seals(micro_batch())
    assert untouched is not None
    fetch([untouched])
    for name in ("old_log_probs", "advantages", "rollout_log_probs", "offpolicy_teacher"):
        changed = check_seals(micro_batch(**{name: torch.full((4, 4), -0.125)}))
        assert changed is not None
        with pytest.raises(SealError, match=f"^{name} changed"):
            fetch([changed])
    batch = micro_batch()
    del batch.data[key_of("advantages")]
    with pytest.raises(SealError, match="the checksums of advantages did not reach the loss"):
        check_seals(batch)
    assert check_seals(replace(batch, plan=SharedPlan(step=3))) is None


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_the_engine_reads_the_tokens_and_the_mask_of_the_loss(rows: list[int]) -> None:
    """For a whole micro-batch and for its parts: one token of the model's input, or of the mask that the engine counts,
    is changed.
    """

    def nested(*lists: list[int]) -> Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(each) for each in lists], layout=torch.jagged)

    def checked(ids: Tensor, counted: Tensor) -> None:
        zeros = nested([0], [0, 0, 0], [0, 0]).float()
        columns = {"advantages": zeros, "old_log_probs": zeros, "rollout_log_probs": zeros}
        prompts, responses = nested([1, 2], [3], [4, 5, 6]), nested([7], [8, 9, 10], [11, 12])
        columns |= {"prompts": prompts, "responses": responses, "response_mask": nested([1], [1, 0, 1], [1, 1])}
        data = TensorDict({**columns, "input_ids": ids, "loss_mask": counted}, batch_size=3)
        fetch([check_engine(read(*take_rows({"log_probs": ids.float()}, data, rows)))])

    sound = nested([1, 2, 7], [3, 8, 9, 10], [4, 5, 6, 11, 12]), nested([1], [1, 0, 1], [1, 1])
    checked(*sound)
    checked(nested([1, 2, 7], [3, 8, 0, 10], [4, 5, 6, 11, 12]), sound[1])  # a tool's token
    with pytest.raises(SealError, match=f"input_ids and responses differ at {len(rows)} of"):
        checked(nested([1, 2, 0], [3, 0, 9, 10], [4, 5, 6, 11, 0]), sound[1])
    with pytest.raises(SealError, match=r"loss_mask has \d tokens in a micro-batch, but response_mask has"):
        checked(sound[0], nested([0], [1, 1, 1], [1, 0]))
