"""Supports read from vLLM's log-probs, and notes of a row's supports."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recipe.offpolicy.support.token_supports import SupportNote, TokenSupports, hash_supports, read_note, read_supports

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


def test_the_likeliest_ids_are_read_with_their_log_probs_whether_or_not_they_are_the_support() -> None:
    """The sampled token counts only if it is among them: 9 is, and 7 is not."""
    ids, log_probs = [9, 3, 9, 7, 9, 3], np.log([0.2, 0.5, 0.2, 0.1, 0.6, 0.2]).tolist()
    found = read_supports(ids, log_probs, 2, likeliest=True)
    assert found.pad().tolist() == [[3, 9], [9, 3]]
    assert np.allclose(np.exp(found.pad_log_probs()), [[0.5, 0.2], [0.6, 0.2]])
    assert np.allclose(found.masses, [0.7, 0.8])
    assert found.cut(1, 2).pad_log_probs().tolist() == found.pad_log_probs()[1:].tolist()
    assert read_supports(ids, log_probs, 2).pad_log_probs().shape == (2, 0)


def supports(*rows: list[int]) -> TokenSupports:
    sizes = np.array([len(row) for row in rows], np.uint8)
    return TokenSupports(
        sizes, np.array([each for row in rows for each in row], np.uint8), np.ones(len(rows), np.float32)
    )


def test_the_checksum_ties_supports_to_tokens_and_places() -> None:
    places, tokens, ids = torch.tensor([2, 3]), torch.tensor([5, 6]), torch.tensor([[5, 7], [6, -1]])
    none, log_probs = torch.zeros(2, 0), torch.tensor([[-0.1, -2.0], [-0.5, -torch.inf]])
    for values in (none, log_probs):
        one = int(hash_supports(places, tokens, ids, values).sum())
        wider = torch.cat([ids, torch.full((2, 3), -1)], 1)
        padded = torch.cat([values, torch.full((2, 3), -torch.inf)], 1) if values.shape[1] else values
        assert int(hash_supports(places, tokens, wider, padded).sum()) == one
        others = [
            (places + 1, tokens, ids, values),
            (places, tokens.flip(0), ids, values),
            (places, tokens, ids.flip(0), values),
            (places, tokens, torch.tensor([[7, 5], [6, -1]]), values),
            (places, tokens, torch.tensor([[5, 7], [-1, -1]]), values),
            (places, tokens, ids, log_probs if values is none else none),
            (places, tokens, ids, log_probs.flip(0)),
            (places, tokens, ids, log_probs.nextafter(torch.zeros(()))),
        ]
        assert one not in [int(hash_supports(*other).sum()) for other in others]


def test_a_note_whose_parts_do_not_fit_is_none() -> None:
    note = SupportNote()
    note.add([1], [5, 6], supports([5, 7], [6]))
    plain = note.finish().to_plain()
    assert read_note(plain) is not None
    assert read_note(note) is not None
    assert read_note({**plain, "ids": plain["ids"][:-1]}) is None
    assert read_note({**plain, "sizes": plain["sizes"][:-1]}) is None
    assert read_note({**plain, "spans": [[1, 3]]}) is None
    assert read_note({**plain, "masses": [1.0]}) is None
    assert read_note({**plain, "log_probs": np.zeros(2, np.float32)}) is None
    assert read_note({"spans": []}) is None
    assert read_note(None) is None
