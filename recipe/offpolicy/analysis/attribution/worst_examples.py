"""Tokens and rows with the largest mismatch, each with its context as safe text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...fault_tolerance.redaction import redact_text
from ...monitor.mismatch_shares import COLUMNS
from ...recording import Rows
from .recorded_tokens import Array, hash_ids, hash_prompts

_OPTION = "Pass --tokenizer FOLDER, the folder of the model's tokenizer, to see text"


def escape(text: str) -> str:
    """Escape characters that are not printable; for example, a line feed becomes \\n."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@dataclass(frozen=True)
class TokenDecoder:
    """Decoder of recorded token ids to escaped text.

    Attributes:
        tokenizer: a transformers tokenizer, or None to show ids.
    """

    tokenizer: Any = None

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to one line; show the ids if the tokenizer does not contain them."""
        ids = [int(token) for token in ids]
        if self.tokenizer is not None and ids:
            try:
                return escape(self.tokenizer.decode(ids, skip_special_tokens=False))
            # Tokenizers raise one of these exceptions for ids beyond their vocabulary.
            except (IndexError, KeyError, OverflowError, TypeError, ValueError):
                pass
        return " ".join(map(str, ids))


def load_decoder(card: Mapping[str, Any]) -> tuple[TokenDecoder, str]:
    """Load the decoder of a recording: the tokenizer that its card names, otherwise the tokenizer of its model.

    Returns:
        The decoder, and an explanation of why it shows ids and how to obtain text (empty if it shows text). Nothing is
        fetched from a network.
    """
    model = card.get("tokenizer") or card.get("model")
    if not isinstance(model, str) or not model:
        return TokenDecoder(), f"the recording does not name its model. {_OPTION}"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return TokenDecoder(), "transformers is not installed. Install it to see text"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    # A model folder may contain anything, and the analysis must not fail because text is missing.
    except Exception as error:
        shown = escape(redact_text(model))
        return TokenDecoder(), f"{shown} has no readable tokenizer ({type(error).__name__}). {_OPTION}"
    return TokenDecoder(tokenizer), ""


BEFORE, AFTER = 12, 4
"""Number of tokens to show as context before and after a token."""
EXCERPT: Final = 60
"""Number of tokens of a row to show."""
_LOG_PROBS: Final = {"mu": "rollout_log_prob", "old": "old_log_prob", "pi": "log_prob"}
Example = TypeVar("Example", "WorstToken", "WorstRow")


@dataclass(frozen=True)
class WorstToken:
    """A token in its context, with its k3 of log pi/mu.

    Attributes:
        position: position in its response, from 0.
        count: number of rows of the same step that sampled this token after the same ids; the copy with the largest k3
            is shown.
        mu, old, pi: log-probs.
        share: share of the sum of k3(log pi/mu) over all tokens that comes from these rows' tokens.
        before, token, after: escaped text, or ids.
    """

    step: int
    uid: str
    row: int
    position: int
    turn: int
    staleness: int
    count: int
    mu: float
    old: float
    pi: float
    share: float
    before: str
    token: str
    after: str


@dataclass(frozen=True)
class WorstRow:
    """A row, with its mean k3 of log pi/mu.

    Attributes:
        length: number of valid tokens.
        count: number of rows of the same step with the same ids in prompt and response; the row with the largest k3 is
            shown.
        k3: mean per token.
        log_ratio: sum of log pi/mu, nats.
        share: share of the sum of k3 over all rows that comes from these rows.
        text: the beginning of the escaped text, or ids.
    """

    step: int
    uid: str
    row: int
    length: int
    staleness: int
    count: int
    k3: float
    log_ratio: float
    share: float
    text: str


def find_worst(rows: Rows, sums: Array, loss: Array, most: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Find the ``most`` tokens with the largest k3, and rows with the largest mean k3, in one step.

    Each context and each text is listed only once; nothing is listed if all log-probs agree.

    Args:
        sums: (N, *SHAPE), from ``place_cells``.
        loss: (M,), from ``sum_cells``.

    Returns:
        Frames with the fields of the examples, with their text as lists of ids. The examples are sorted by ``size``,
        and also have ``context`` and ``loss``, the sum of k3 over all copies of an example.
    """
    # Hashes of all ids, from the prompt's first id up to each token's own id.
    contexts = hash_ids(rows.response_ids, rows.offsets) + np.repeat(hash_prompts(rows), np.diff(rows.offsets))
    found = _find_largest(loss, loss, contexts, len(rows), most)
    index = found["place"].to_numpy()
    row = np.searchsorted(rows.offsets, index, side="right") - 1
    place = index - rows.offsets[row]
    ids = [_join_ids(rows, at) for at in row]
    starts = np.diff(rows.prompt_offsets)[row] + place
    worst_tokens = found.with_columns(
        *_describe(rows, row),
        position=place,
        turn=rows.turn[index].astype(np.int64),
        staleness=rows.token_staleness[index],
        **{name: getattr(rows, column)[index].astype(np.float64) for name, column in _LOG_PROBS.items()},
        before=_list([of[max(at - BEFORE, 0) : at] for of, at in zip(ids, starts, strict=True)]),
        token=_list([of[at : at + 1] for of, at in zip(ids, starts, strict=True)]),
        after=_list([of[at + 1 : at + 1 + AFTER] for of, at in zip(ids, starts, strict=True)]),
    )
    count, total, k3 = (sums[..., COLUMNS.index(name)].sum((1, 2)) for name in ("tokens", "total", "total_k3"))
    some = np.flatnonzero(k3 > 0)
    texts = contexts[rows.offsets[some + 1] - 1]
    found = _find_largest((k3 / np.maximum(count, 1))[some], k3[some], texts, len(rows), most)
    row = some[found["place"]]
    worst_rows = found.with_columns(
        *_describe(rows, row),
        length=count[row].astype(np.int64),
        staleness=rows.staleness[row],
        k3="size",
        log_ratio=total[row],
        text=_list(
            [rows.response_ids[a:b][:EXCERPT] for a, b in zip(rows.offsets[row], rows.offsets[row + 1], strict=True)]
        ),
    )
    return worst_tokens, worst_rows


def _find_largest(size: Array, loss: Array, context: NDArray[np.uint64], rows: int, most: int) -> pl.DataFrame:
    """Find the ``most`` largest positive sizes, one per context, with ``count`` and ``loss`` summed over its copies."""
    known = pl.DataFrame({"place": np.arange(len(size)), "size": size, "context": context, "loss": loss})
    known = known.filter(pl.col("loss") >= 0)
    # A context occurs at most once per row, so the largest values contain enough different contexts.
    largest = known.filter(pl.col("size") > 0).top_k(rows * most, by="size")
    largest = largest.sort("size", "place", descending=[True, False]).drop("loss")
    found = largest.unique("context", keep="first", maintain_order=True).head(most)
    copies = known.join(found, on="context", how="semi").group_by("context")
    totals = copies.agg(pl.len().cast(pl.Int64).alias("count"), pl.col("loss").sum())
    return found.join(totals, on="context", maintain_order="left")


def merge_copies(found: pl.DataFrame, most: int) -> pl.DataFrame:
    """Merge examples from several pieces by step and context, each represented by the largest of its copies."""
    firsts = pl.all().exclude("step", "context", "count", "loss").first()
    ordered = found.sort("size", descending=True, maintain_order=True)
    merged = ordered.group_by("step", "context", maintain_order=True)
    return merged.agg(firsts, pl.col("count", "loss").sum()).head(most).select(found.columns)


def build_examples(kind: type[Example], found: pl.DataFrame, k3: float, reader: TokenDecoder) -> list[Example]:
    """Build the examples (tokens or rows) from their frame, with shares of ``k3``, the sum over all tokens."""
    found = found.with_columns(share=pl.col("loss") / k3).select(field.name for field in fields(kind))
    text = [name for name, dtype in found.schema.items() if dtype == pl.List]
    decoded = ({**each, **{name: reader.decode(each[name]) for name in text}} for each in found.iter_rows(named=True))
    return [kind(**values) for values in decoded]


def _describe(rows: Rows, row: NDArray[np.int64]) -> list[pl.Series]:
    uids = pl.Series("uid", map(str, rows.uid[row]), dtype=pl.String)
    return [pl.Series("step", rows.step[row]), uids, pl.Series("row", row)]


def _join_ids(rows: Rows, row: int) -> NDArray[np.int32]:
    """Join the ids of a row's prompt and response."""
    prompt = rows.prompt_ids[rows.prompt_offsets[row] : rows.prompt_offsets[row + 1]]
    return np.concatenate([prompt, rows.response_ids[rows.offsets[row] : rows.offsets[row + 1]]])


def _list(ids: list[NDArray[np.int32]]) -> pl.Series:
    return pl.Series([each.tolist() for each in ids], dtype=pl.List(pl.Int32))
