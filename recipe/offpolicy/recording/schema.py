"""Columns of a recorded step, one Parquet row per response: the only definition of their names.

A file holds one step of one rank, or one update if a step makes several. Token columns are lists over the response,
from its first token to its last valid one; tool outputs in between are included, with ``response_mask`` False. All
lists of a row have the same length.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

VERSION = 3
"""Increased whenever a column is added, removed or changes its meaning, or the digest changes."""
ADDED = {"version": 2}
"""Columns missing in older files -> the version that added them."""

VERSION_KEY = b"offpolicy.schema"
"""Key of the file's metadata: ``VERSION``, in digits."""
SPEC_KEY = b"offpolicy.correction"
"""Key of the file's metadata: the correction that acted, as JSON of ``CorrectionSpec.to_mapping``."""
REASONS_KEY = b"offpolicy.rejected_by"
"""Key of the file's metadata: JSON list of the parts that can reject (``masks.gsm``), a bit of ``rejected_by`` each."""
DIGEST_KEY = b"offpolicy.digest"
"""Key of the file's metadata: ``digest`` of everything else that a reader gets from the file."""

FAST_DIGEST = 3
"""First version whose digest is XXH3; earlier ones use BLAKE2b."""

UNKNOWN_VERSION = -1
"""Version of the weights if verl does not record it."""

ROW_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "the trainer's step, from 1; it starts with weights of version step - 1"),
    "rank": (pa.int32(), "data-parallel rank"),
    "mini_batch": (pa.int32(), "number of gradient steps of this step before the first one that used the row"),
    "uid": (pa.string(), "the prompt's group, as named by verl; empty if unknown"),
    "reward": (pa.float32(), "sum of the row's scores, before any KL in the reward; NaN if unknown"),
    "oldest_version": (pa.int64(), "version of the weights that sampled the first token; -1 if unknown"),
    "newest_version": (pa.int64(), "version of the weights that sampled the last token; -1 if unknown"),
    "length": (pa.int32(), "T, number of valid response tokens"),
}
TOKEN_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "response_ids": (pa.int32(), "token ids"),
    "response_mask": (pa.bool_(), "True if the policy generated the token"),
    "rollout_log_prob": (pa.float32(), "log mu"),
    "old_log_prob": (pa.float32(), "log pi_old, as the correction uses it"),
    "log_prob": (pa.float32(), "log pi at the first gradient step that used the row"),
    "advantages": (pa.float32(), "advantages, as verl's loss uses them"),
    "weight": (
        pa.float32(),
        "factor of the policy term by the correction, before masks and the scale of denominator=kept; "
        "0 where the token is not valid",
    ),
    "rejected_by": (
        pa.uint32(),
        "bits of the parts that rejected the token; 0: kept, or not valid (off response_mask, mu or pi_old not finite)",
    ),
    "turn": (pa.int16(), "number of the policy's turn in its row, from 0; -1 off response_mask"),
    "version": (pa.int32(), "version of the weights that sampled the token; -1 if unknown, and off response_mask"),
}
EXTENSION_PREFIX = "offpolicy_"
"""Prefix of additional token columns that extensions record: lists of float32, after the others."""
WITHOUT_REPLAY = "offpolicy_old_log_prob_without_replay"
"""Additional column: log pi_old under the trainer's own expert routes, with ``offpolicy.record.without_replay``."""
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
    """Extend the schema of this version with columns of extensions."""
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
