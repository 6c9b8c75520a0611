"""What the comparison with other frameworks' packages must find, without any package."""

from __future__ import annotations

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.conformance import Loss, Options, Rows, compare, our_loss

STEM = "vllm_importance_sampling"


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    return our_loss(spec, rows)


@pytest.mark.parametrize("other", [{f"{STEM}_clip_max": 1.3}, {f"{STEM}_mode": "token_mask"}])
def test_another_rule_is_found(other: Options) -> None:
    def theirs(options: Options, rows: Rows) -> Loss:
        return our_loss(CorrectionSpec.from_trl(options), rows)

    def changed(options: Options, rows: Rows) -> Loss:
        return our_loss(CorrectionSpec.from_trl(options | other), rows)

    grid = {f"{STEM}_mode": ["token_truncate"], f"{STEM}_clip_max": [1.2]}
    compare("trl", grid, theirs, ours, draws=20)
    with pytest.raises(AssertionError, match=r"gradient of trl|loss of trl"):
        compare("trl", grid, changed, ours, draws=20)
    with pytest.raises(AssertionError, match="never translated"):
        compare("trl", grid | {f"{STEM}_clip_min": [-1.0]}, theirs, ours, draws=20)
