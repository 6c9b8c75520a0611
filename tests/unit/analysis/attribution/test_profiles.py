"""Where the mismatch sits, its worst examples, and their text."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from recipe.offpolicy.analysis.attribution import decomposition
from recipe.offpolicy.analysis.attribution.decomposition import (
    PROFILES,
    Bucket,
    build_profiles,
    merge,
    place_cells,
    sum_cells,
)
from recipe.offpolicy.analysis.attribution.recorded_tokens import select_valid_tokens
from recipe.offpolicy.analysis.attribution.worst_examples import (
    TokenDecoder,
    WorstRow,
    WorstToken,
    _find_largest,
    build_examples,
    escape,
    find_worst,
    load_decoder,
)
from recipe.offpolicy.monitor.mismatch_shares import EDGES
from recipe.offpolicy.recording import Rows
from tests.support.recordings import drawn_rows


def k3(value: float) -> float:
    return math.expm1(value) - value


def two_rows(**columns: Any) -> Rows:
    """Rows of 2 and 3 tokens; the gap is 0.1 everywhere, and -1 at the last token, in another turn after a tool's."""
    mu = np.log(np.array([0.3, 0.95, 0.3, 0.5, 0.0005])).astype(np.float32)
    gap = np.array([0.1, 0.1, 0.1, 5.0, -1.0], dtype=np.float32)
    values: dict[str, Any] = {
        "rollout_log_prob": mu,
        "old_log_prob": mu + gap,
        "log_prob": mu + gap,
        "response_mask": np.array([True, True, True, False, True]),
        "length": np.array([2, 2], dtype=np.int32),
        "turn": np.array([0, 0, 0, -1, 1], dtype=np.int16),
        "response_ids": np.array([10, 11, 12, 13, 14], dtype=np.int32),
        "prompt_ids": np.array([1, 2, 3, 4], dtype=np.int32),
        "oldest_version": np.array([0, -1]),
    }
    return drawn_rows([2, 3], **(values | columns))


def profile(rows: Rows) -> dict[str, list[Bucket]]:
    return build_profiles(merge(sum_cells(rows)[0], *PROFILES))


def find(rows: Rows, most: int, reader: TokenDecoder | None = None) -> tuple[list[WorstToken], list[WorstRow]]:
    """The worst tokens and rows, with shares of the k3 of all tokens."""
    cells, loss = sum_cells(rows)
    tokens, worst = find_worst(rows, place_cells(cells, len(rows)), loss, most)
    whole, reader = float(loss[loss > 0].sum()), reader or TokenDecoder()
    return build_examples(WorstToken, tokens, whole, reader), build_examples(WorstRow, worst, whole, reader)


def test_profiles_worked_by_hand() -> None:
    """The tool's token, with a gap of 5, is in none of them."""
    rows = two_rows()
    found = profile(rows)
    whole = 3 * k3(0.1) + k3(-1.0)
    turns = {bucket.name: bucket for bucket in found["turn"]}
    assert set(turns) == {"0", "1"}
    assert (turns["0"].tokens, turns["1"].tokens) == (3, 1)
    assert turns["0"].k3 == pytest.approx(k3(0.1), rel=1e-5)
    assert turns["1"].share == pytest.approx(k3(-1.0) / whole, rel=1e-5)
    assert turns["1"].mean == pytest.approx(-1.0, rel=1e-6)
    assert {bucket.name: bucket.tokens for bucket in found["probability"]} == {"< 0.001": 1, "0.1-0.5": 2, "> 0.9": 1}
    # Places from 1: the first tokens of both rows; places 2 and 3 of the second and third.
    assert {bucket.name: bucket.tokens for bucket in found["position"]} == {"1": 2, "2-4": 2}
    assert {bucket.name: bucket.tokens for bucket in found["length"]} == {"2-4": 4}
    assert {bucket.name: bucket.tokens for bucket in found["staleness"]} == {"unknown": 2, "0": 2}
    for buckets in found.values():
        assert sum(bucket.share for bucket in buckets) == pytest.approx(1.0)


def test_log_probs_that_are_not_finite_are_left_out() -> None:
    rows = two_rows()
    log_prob = rows.log_prob.copy()
    log_prob[0] = np.nan
    lacking = two_rows(log_prob=log_prob)
    assert select_valid_tokens(lacking).index.tolist() == [1, 2, 4]
    cells, loss = sum_cells(lacking)
    assert (loss < 0).tolist() == [True, False, False, True, False]
    assert cells["tokens"].sum() == 3


def test_a_text_is_listed_once_with_its_rows() -> None:
    """Four rows of one token 7: gaps of 0.4, 0.5 and 0.3 after prompt 1, and of 0.2 after prompt 2."""
    mu = np.full(4, -1.0, dtype=np.float32)
    pi = mu + np.array([0.4, 0.5, 0.3, 0.2], dtype=np.float32)
    rows = drawn_rows(
        [1, 1, 1, 1],
        rollout_log_prob=mu,
        old_log_prob=pi,
        log_prob=pi,
        response_ids=np.full(4, 7, dtype=np.int32),
        prompt_offsets=np.arange(5),
        prompt_ids=np.array([1, 1, 1, 2], dtype=np.int32),
    )
    first, second = find(rows, 3)[1]
    assert (first.row, first.count, second.row, second.count) == (1, 3, 3, 1)
    assert first.k3 == pytest.approx(k3(0.5), rel=1e-5)
    whole = k3(0.4) + k3(0.5) + k3(0.3) + k3(0.2)
    assert first.share == pytest.approx(1 - k3(0.2) / whole, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain «ä» 漢", "plain «ä» 漢"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("right\u202eto left\u2028", "right\\u202eto left\\u2028"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_what_would_act_on_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_ids_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    assert TokenDecoder().decode([3, 1]) == "3 1"
    for card, why in (
        ({}, "does not name its model"),
        ({"model": 7}, "does not name its model"),
        ({"model": f"{tmp_path}/gone\x1b"}, "gone\\x1b"),
        ({"model": str(tmp_path)}, "no readable tokenizer"),
    ):
        reader, reason = load_decoder(card)
        assert reader.decode([3, 1]) == "3 1"
        assert why in reason
        assert "--tokenizer FOLDER" in reason


def test_without_transformers_the_reason_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_decoder({"model": str(tmp_path)})[1] == "transformers is not installed. Install it to see text"


def test_text_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    """Special tokens are shown, and bytes that are no text are escaped."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.save_pretrained(tmp_path)
    reader, why = load_decoder({"model": str(tmp_path)})
    assert why == ""
    assert reader.decode(tokenizer.encode("a\nb<|end|>")) == "a\\nb<|end|>"
    assert reader.decode([]) == ""
    assert load_decoder({"tokenizer": str(tmp_path), "model": f"{tmp_path}/gone"})[1] == ""
    # Of another model, or made up.
    assert reader.decode([-1]) == "-1"


@given(arrays(np.float64, st.integers(0, 700), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(0, 9)))
def test_the_largest_come_first_and_of_equals_the_earlier(values: NDArray[np.float64]) -> None:
    """Of contexts that all differ, and that are one in all."""
    found = _find_largest(values, values, np.arange(len(values), dtype=np.uint64), 2)
    ordered = np.argsort(-values, kind="stable")
    assert found["place"].to_list() == [place for place in ordered if values[place] > 0][:2]
    (one,) = _find_largest(values, values, np.zeros(len(values), dtype=np.uint64), 2).rows() or [(None,) * 5]
    assert one[0] == (ordered[0] if values.any() else None)
    assert (one[3], one[4]) == ((len(values), pytest.approx(values.sum())) if values.any() else (None, None))


def test_buckets_far_apart_are_those_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn_rows([3, 50, 7, 20], step=9, drift=0.1, oldest_version=np.array([8, 8, 1, 5]))
    found = profile(rows)
    assert {bucket.name for bucket in found["staleness"]} == {"0", "3", "7"}
    monkeypatch.setattr(decomposition, "_MOST_CELLS", 1)
    assert profile(rows) == found


@pytest.mark.parametrize("block", [decomposition.BLOCK, 20])
def test_sums_of_buckets_are_those_of_their_tokens(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of a few rows as in one of all."""
    monkeypatch.setattr(decomposition.iterate_bounds, "__defaults__", (block,))
    rows = drawn_rows([3, 50, 7, 20], backend=0.3, drift=0.1)
    tokens = select_valid_tokens(rows)
    whole = (np.exp(tokens.gap) - 1 - tokens.gap).sum()
    for name, key in (("turn", tokens.turn), ("probability", np.digitize(tokens.mu, EDGES))):
        found = profile(rows)[name]
        assert len(found) == len(np.unique(key))
        for value, bucket in zip(np.unique(key), found, strict=True):
            gap, drift = (of[key == value] for of in (tokens.gap, tokens.pi - tokens.old))
            k3_sum = (np.exp(gap) - 1 - gap).sum()
            assert bucket.tokens == len(gap)
            assert [bucket.mean, bucket.std, bucket.drift_std] == pytest.approx([gap.mean(), gap.std(), drift.std()])
            assert [bucket.k3, bucket.share] == pytest.approx([k3_sum / len(gap), k3_sum / whole])
