"""Extensions with rows that leave the update: exactly the other rows must reach the loss, with verl's own trainer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from recipe.offpolicy.proof.verify import LivenessError
from tests.support.corrections import GSM, TIS
from tests.support.examples import at_most, each_nth_by_default
from tests.support.fake_teacher import FakeTeacher, serving

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

from tests.support.distilled import opinion  # noqa: E402
from tests.support.late_rows import Case, update  # noqa: E402

SECTIONS: dict[str, dict[str, Any]] = {
    "length_penalty": {"kind": "uniform", "coefficient": 0.01},
    "pass_at_k": {"objective": "loo", "k": 2},
    "process_reward": {},
    "opd": {"mode": "loss", "eligible": {"rows": "all", "max_pass_rate": 1.0}},
}
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight": TIS},
    {"weight": TIS, "masks": {"gsm": GSM}, "denominator": "kept"},
)


@pytest.fixture(scope="module", autouse=True)
def teacher() -> Iterator[None]:
    with serving(FakeTeacher(score=opinion)) as served:
        served.answering.set()
        SECTIONS["opd"]["teacher"] = {"url": served.url}
        yield


def sections(*names: str, **opd: Any) -> dict[str, Any]:
    return {name: SECTIONS[name] | (opd if name == "opd" else {}) for name in names}


@pytest.mark.slow
@settings(max_examples=at_most(60), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_a_healthy_update_passes_whichever_rows_are_too_old(data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([4, 6, 8, 10]))
    too_old, eta = data.draw(st.sampled_from(["mask", "refresh", "wait", "drop"])), data.draw(st.sampled_from([1, 2]))
    oldest = 5 if too_old in ("mask", "refresh") else eta
    ages = data.draw(st.lists(st.integers(0, oldest), min_size=rows, max_size=rows))
    names = data.draw(st.sets(st.sampled_from([*SECTIONS]), min_size=1))
    ranks = data.draw(st.sampled_from([1, 2]))
    case = Case(
        ages,
        data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows)),
        data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=rows, max_size=rows)),
        sections(*names, mode=data.draw(st.sampled_from(["loss", "advantage"]))),
        eta=eta,
        too_old=too_old,
        epochs=data.draw(st.sampled_from([1, 2])),
        ranks=ranks,
        mini_batch=data.draw(st.sampled_from([4, 8])),
        correction=data.draw(st.sampled_from(CORRECTIONS)),
    )
    if min(ages) > eta:  # nothing would be left to train
        return
    assert update(case)["flagged"]


def healthy(*names: str, **changes: Any) -> Case:
    """Row 1 is too old and masked; rows 4 to 7, a mini-batch that is too old, stay with an advantage of 0."""
    ages = [0, 3, 0, 1, 3, 3, 3, 3]
    lengths, scores = [4] * 8, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    return Case(ages, lengths, scores, sections(*names), **changes)


def change_one(parts: list[TensorDict]) -> list[TensorDict]:
    part = next(part for part in parts if part["response_mask"].values().any())
    for column in ("advantages", "offpolicy_opd_teacher"):
        if column in part.keys():
            part[column].values()[part["response_mask"].values().bool().nonzero()[0]] += 0.01
    return parts


def lose_one(parts: list[TensorDict]) -> list[TensorDict]:
    first = parts[0]["response_mask"].offsets()[1]
    parts[0]["response_mask"].values()[:first] = 0
    return parts


def repeat_one(parts: list[TensorDict]) -> list[TensorDict]:
    return [parts[0].clone(), *parts]


def repeat_all(parts: list[TensorDict]) -> list[TensorDict]:
    return [*(part.clone() for part in parts), *parts]


def bring_back(parts: list[TensorDict]) -> list[TensorDict]:
    for part in parts:
        part["response_mask"].values().fill_(1)
    return parts


def give_back_advantages(parts: list[TensorDict]) -> list[TensorDict]:
    for part in parts:
        lost = part["advantages"].values() == 0
        part["advantages"].values()[lost] = 1.0
        if "offpolicy_opd_row" in part.keys():
            part["offpolicy_opd_row"].fill_(1)
    return parts


CHANGES = (change_one, lose_one, repeat_one, repeat_all, bring_back, give_back_advantages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "epochs"), each_nth_by_default(5, itertools.product(SECTIONS, CHANGES, (1, 2)))
)
def test_a_row_that_is_changed_missing_doubled_or_back_stops_the_run(name: str, change: Any, epochs: int) -> None:
    with pytest.raises(LivenessError, match=rf"{name}: the loss did not receive .*1 left: too old, .*too_old=mask"):
        update(healthy(name, change=change, epochs=epochs))
