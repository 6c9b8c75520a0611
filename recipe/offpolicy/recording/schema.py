"""Columns of a recorded step, one Parquet row a response: the one place that names them.

A file holds what one rank saw of one step, or of one update where a step makes several. Columns of tokens are lists
over the response, from its first token to its last valid one; tool outputs in between are there, with
``response_mask`` False. All lists of a row have one length.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

VERSION = 3
"""Grows whenever a column is added, removed or changes its meaning, or the digest becomes another."""
ADDED = {"version": 2}
"""Columns that older files lack -> the version that added them."""

VERSION_KEY = b"offpolicy.schema"
"""In the file's metadata: ``VERSION``, in digits."""
SPEC_KEY = b"offpolicy.correction"
"""In the file's metadata: the correction that acted, as JSON of ``CorrectionSpec.to_mapping``."""
REASONS_KEY = b"offpolicy.rejected_by"
"""In the file's metadata: JSON list, what can reject a token (``masks.gsm``), a bit of ``rejected_by`` each."""
DIGEST_KEY = b"offpolicy.digest"
"""In the file's metadata: ``digest`` of everything else that a reader gets of it."""

FAST_DIGEST = 3
"""Version from which the digest is XXH3; before, it is BLAKE2b."""

UNKNOWN_VERSION = -1
"""For versions of the weights, where verl does not tell them."""

ROW_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "the trainer's step, from 1; the weights that it began with are of version step - 1"),
    "rank": (pa.int32(), "data-parallel rank"),
    "mini_batch": (pa.int32(), "gradient steps of this step before the one that used the row first"),
    "uid": (pa.string(), "the prompt's group, as verl names it; empty where it is not known"),
    "reward": (pa.float32(), "sum of the row's scores, before any KL in the reward; NaN where it is not known"),
    "oldest_version": (pa.int64(), "of the weights that sampled the first token; -1 where it is not known"),
    "newest_version": (pa.int64(), "of the weights that sampled the last token; -1 where it is not known"),
    "length": (pa.int32(), "T, valid response tokens"),
}
TOKEN_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "response_ids": (pa.int32(), "token ids"),
    "response_mask": (pa.bool_(), "whether the token is the model's own"),
    "rollout_log_prob": (pa.float32(), "log mu"),
    "old_log_prob": (pa.float32(), "log pi_old, as the correction takes it"),
    "log_prob": (pa.float32(), "log pi at the first gradient step that used the row"),
    "advantages": (pa.float32(), "as verl's loss takes them"),
    "weight": (
        pa.float32(),
        "what the correction multiplies the policy term by, before masks and the scale of denominator=kept; "
        "0 where it is not valid",
    ),
    "rejected_by": (
        pa.uint32(),
        "bits of what rejected the token; 0: kept, or not valid: off response_mask, or mu or pi_old not finite",
    ),
    "turn": (pa.int16(), "number of the model's turn in its row, from 0; -1 off response_mask"),
    "version": (pa.int32(), "of the weights that sampled the token; -1 where it is not known, and off response_mask"),
}
EXTENSION_PREFIX = "offpolicy_"
"""Of columns by token that extensions record beside those named here: lists of float32, behind the others."""
WITHOUT_REPLAY = "offpolicy_old_log_prob_without_replay"
"""Likewise: log pi_old by the trainer's own expert routes, with ``offpolicy.record.without_replay``."""
PROMPT_COLUMN = "prompt_ids"
_PROMPT = "token ids of the prompt; empty where prompts were not recorded"

SCHEMA = pa.schema(
    [
        *(pa.field(name, kind, nullable=False) for name, (kind, _) in ROW_COLUMNS.items()),
        pa.field(PROMPT_COLUMN, pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        *(
            pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)
            for name, (kind, _) in TOKEN_COLUMNS.items()
        ),
    ]
)


def has_column(name: str, version: int) -> bool:
    """Return True if files of this version have the column."""
    return ADDED.get(name, 1) <= version


def extend_schema(names: Iterable[str], version: int = VERSION) -> pa.Schema:
    """Extend the schema of this version by columns of extensions."""
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False))
    own = (field for field in SCHEMA if has_column(field.name, version))
    return pa.schema([*own, *(pa.field(name, kind, nullable=False) for name in names)])


def format_markdown() -> str:
    """Format the table of all columns as Markdown, for the documentation."""
    described = ROW_COLUMNS | TOKEN_COLUMNS | {PROMPT_COLUMN: (pa.int32(), _PROMPT)}
    rows = []
    for field in SCHEMA:
        kind, meaning = described[field.name]
        rows.append(f"| `{field.name}` | {f'list of {kind}' if pa.types.is_list(field.type) else kind} | {meaning} |")
    return "\n".join(("| column | type | meaning |", "|---|---|---|", *rows)) + "\n"
