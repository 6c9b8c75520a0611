"""The version of the weights that sampled each token, as verl notes it by row."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.weight_versions import (
    VERSIONS,
    RowVersions,
    check_ages_known,
    compute_token_versions,
    read_row_versions,
)
from recipe.offpolicy.correction import CorrectionSpec

MASK = torch.ones(2, 3)


def test_a_row_of_two_versions_has_none_by_token() -> None:
    versions = read_row_versions(TensorDict({VERSIONS: torch.tensor([[4, 5], [7, 7]])}, batch_size=[2]), [])
    with pytest.raises(ValueError, match="1 sequences were sampled by several versions"):
        compute_token_versions(versions, MASK)


def test_parts_that_go_by_age_need_the_versions_and_the_step() -> None:
    spec = CorrectionSpec.from_mapping({"masks": {"stale": {"aggregate": "staleness", "level": "token", "upper": 4}}})
    one, several = (RowVersions(torch.tensor([3, 3]), torch.tensor([3, newest])) for newest in (3, 4))
    check_ages_known(CorrectionSpec(), None, None)
    check_ages_known(spec, one, 5)
    with pytest.raises(ValueError, match="the batch lacks the version of the weights that sampled each row"):
        check_ages_known(spec, None, 5)
    with pytest.raises(ValueError, match="the batch lacks the trainer's step"):
        check_ages_known(spec, one, None)
    with pytest.raises(ValueError, match=r"masks\.stale\.level=token: 1 sequences were sampled by several versions"):
        check_ages_known(spec, several, 5)
