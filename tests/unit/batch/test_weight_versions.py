"""The version of the weights that sampled each token, as verl notes it by row."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.weight_versions import VERSIONS, compute_token_versions, read_row_versions

MASK = torch.ones(2, 3)


def test_every_token_has_the_version_of_its_row() -> None:
    versions = read_row_versions(TensorDict({VERSIONS: torch.tensor([[4, 4], [7, 7]])}, batch_size=[2]))
    assert compute_token_versions(versions, MASK).tolist() == [[4, 4, 4], [7, 7, 7]]


def test_a_row_of_two_versions_has_none_by_token() -> None:
    versions = read_row_versions(TensorDict({VERSIONS: torch.tensor([[4, 5], [7, 7]])}, batch_size=[2]))
    with pytest.raises(ValueError, match="1 rows were sampled by several versions"):
        compute_token_versions(versions, MASK)


def test_where_verl_does_not_tell_there_is_none() -> None:
    versions = read_row_versions(TensorDict({}, batch_size=[2]))
    assert versions is None
    with pytest.raises(ValueError, match="verl does not say which version"):
        compute_token_versions(versions, MASK)
