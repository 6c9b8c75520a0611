"""What arrives in the workers is held against what was shipped, as multisets of rows."""

from __future__ import annotations

import pytest

from recipe.offpolicy.extensions.advantage_proof import AdvantageReport, check_arrival
from recipe.offpolicy.proof.verify import LivenessError


def test_rows_may_come_in_any_order_and_as_often_as_there_are_epochs() -> None:
    check_arrival("x", (3, 1, 1), [AdvantageReport((1,)), AdvantageReport((1, 3))])
    check_arrival("x", (3, 1), [AdvantageReport((1, 3)), AdvantageReport((3, 1))])
    check_arrival("x", (), [AdvantageReport(())])


@pytest.mark.parametrize("seen", [(1, 2), (1, 1), (1,), (), (1, 3, 1)])
def test_other_rows_stop_the_run(seen: tuple[int, ...]) -> None:
    with pytest.raises(LivenessError, match=f"advantages of 2 rows were shaped, and the loss saw {len(seen)} rows"):
        check_arrival("x", (1, 3), [AdvantageReport(seen)])
