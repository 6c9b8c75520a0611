"""Supports as they are read from vLLM's log-probs, cut, joined and laid out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recipe.offpolicy.support.token_supports import read_supports

OUT = -math.inf


def logs(*probabilities: float) -> list[float]:
    return [math.log(each) if each else OUT for each in probabilities]


def test_a_support_of_just_as_many_is_known_by_its_mass() -> None:
    found = read_supports([7, 9, 7, 9, 7, 9], logs(0.4, 0.6, 0.4, 0.6, 0.4, 0.6), 2)
    assert found.sizes.tolist() == [2, 2]
    assert found.ids.tolist() == [7, 9, 9, 7]


def test_a_larger_support_is_not_known_and_its_mass_says_so() -> None:
    # The sampled token is not among the two likeliest.
    found = read_supports([5, 9, 7], logs(0.1, 0.3, 0.2), 1)
    assert (found.sizes.tolist(), found.ids.tolist()) == ([0], [])
    assert found.masses[0] == pytest.approx(0.6)


@pytest.mark.parametrize(("largest", "dtype"), [(255, np.uint8), (256, np.uint16), (65536, np.uint32)])
def test_ids_have_the_narrowest_type(largest: int, dtype: type) -> None:
    found = read_supports([largest, largest, 1], logs(1.0, 1.0, 0), 1)
    assert found.ids.dtype == dtype
    assert found.sizes.dtype == np.uint8
    assert found.bytes == 1 + np.dtype(dtype).itemsize


def test_tokens_with_unlike_numbers_of_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ids and 3 log-probs do not fit 2 tokens"):
        read_supports([1, 2, 3], [0.0, 0.0, 0.0], 2)


def test_the_likeliest_ids_are_read_with_their_log_probs_whether_or_not_they_are_the_support() -> None:
    """The sampled token counts where it is among them: 9 is, and 7 is not."""
    ids, log_probs = [9, 3, 9, 7, 9, 3], np.log([0.2, 0.5, 0.2, 0.1, 0.6, 0.2]).tolist()
    found = read_supports(ids, log_probs, 2, likeliest=True)
    assert found.pad().tolist() == [[3, 9], [9, 3]]
    assert np.allclose(np.exp(found.pad_log_probs()), [[0.5, 0.2], [0.6, 0.2]])
    assert np.allclose(found.masses, [0.7, 0.8])
    assert found.cut(1, 2).pad_log_probs().tolist() == found.pad_log_probs()[1:].tolist()
    assert read_supports(ids, log_probs, 2).pad_log_probs().shape == (2, 0)
