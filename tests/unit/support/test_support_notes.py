"""Notes of a row's supports: turns, resumed requests, and the checksum that ties them to the tokens."""

from __future__ import annotations

import numpy as np
import torch

from recipe.offpolicy.support.token_supports import SupportNote, TokenSupports, hash_supports, read_note


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
