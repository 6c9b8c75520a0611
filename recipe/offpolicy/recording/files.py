"""Recorded files: written atomically, and checked against their digest and declared size when read."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from .declared_size import DeclaredError, read_declared_size
from .schema import (
    DIGEST_KEY,
    EXTENSION_PREFIX,
    FAST_DIGEST,
    PROMPT_COLUMN,
    REASONS_KEY,
    ROW_COLUMNS,
    SCHEMA,
    SPEC_KEY,
    TOKEN_COLUMNS,
    VERSION,
    VERSION_KEY,
    Rows,
    extend_schema,
    has_column,
    spread_versions,
)

COMPRESSION = "zstd"
_REPEATED = [
    *("step", "rank", "mini_batch", "uid", "oldest_version", "newest_version", "length"),
    *(f"{name}.list.element" for name in ("response_ids", "prompt_ids", "rejected_by", "turn", "version")),
]
"""Columns whose values repeat. Floats are written unchanged, so each NaN keeps its bits."""
SUFFIX, PARTIAL = ".parquet", ".partial"
"""Suffix of a finished file, and suffix of a file that is being written."""
PRIVATE, PRIVATE_DIRECTORY = 0o600, 0o700
"""File modes of recordings, under which prompts and responses are private to the owner."""
LARGEST = 8 * 2**30
"""Largest unpacked size of a file in bytes; a larger size is treated as an error or an attack."""
UNPACKED, SMALL = 200, 2**26
"""Largest ratio of unpacked size to file size, for files that unpack to more than ``SMALL``; log-probs do not compress
this well."""
MOST_REASONS = 32
"""Maximum number of parts of a correction that can reject: the number of bits of ``rejected_by``."""
_WIDEST = 8  # bytes of a value
_NUMPY = {
    name: np.dtype(kind.to_pandas_dtype())
    for name, (kind, _) in (ROW_COLUMNS | TOKEN_COLUMNS | {PROMPT_COLUMN: (pa.int32(), "")}).items()
    if kind != pa.string()
}


ASIDE = "Move it out of the directory; the other files are read without it."
"""Fix suggested for a damaged file; the file is not removed, so that it can still be inspected."""


class RecordingError(ValueError):
    """A recording cannot be read; the message names the file, describes the problem, and says what to do."""


class OverLimit(RuntimeError):
    """A file would exceed its size limit."""


@dataclass(frozen=True)
class Step:
    """Record of one step, or of those updates in a step that used one correction.

    Attributes:
        rows: its responses.
        spec: the correction that acted, in the form of ``CorrectionSpec.to_mapping``.
        reasons: parts that may have rejected a token; bit i of ``rows.rejected_by`` stands for reasons[i].
    """

    rows: Rows
    spec: Mapping[str, Any]
    reasons: tuple[str, ...]


def to_table(rows: Rows, spec: Mapping[str, Any], reasons: Sequence[str]) -> pa.Table:
    """Convert a step to an Arrow table."""
    if len(reasons) > MOST_REASONS:
        raise ValueError(f"{len(reasons)} parts of the correction can reject, but rejected_by has {MOST_REASONS} bits.")
    columns: dict[str, pa.Array] = {}
    for name, (kind, _) in ROW_COLUMNS.items():
        columns[name] = pa.array(getattr(rows, name), type=kind)
    columns[PROMPT_COLUMN] = _lists(rows.prompt_offsets, rows.prompt_ids, PROMPT_COLUMN)
    for name in TOKEN_COLUMNS:
        columns[name] = _lists(rows.offsets, getattr(rows, name), name)
    schema = extend_schema(rows.extensions)
    for name, values in rows.extensions.items():
        columns[name] = _lists(rows.offsets, values, name, schema)
    metadata = {
        VERSION_KEY: str(VERSION).encode(),
        SPEC_KEY: json.dumps(spec, sort_keys=True).encode(),
        REASONS_KEY: json.dumps(list(reasons)).encode(),
    }
    metadata[DIGEST_KEY] = compute_digest(rows, metadata)
    return pa.table([columns[name] for name in schema.names], schema=schema.with_metadata(metadata))


def compute_digest(rows: Rows, metadata: Mapping[bytes, bytes]) -> bytes:
    """Compute the hexadecimal checksum of all bits of the rows and of their metadata."""
    version = int(metadata.get(VERSION_KEY, VERSION))
    # Both hashes detect damage but not forgery, because whoever can write a file can also write its digest.
    state = xxhash.xxh3_128() if version >= FAST_DIGEST else hashlib.blake2b(digest_size=16)
    for key in (VERSION_KEY, SPEC_KEY, REASONS_KEY):
        state.update(metadata.get(key, b"") + b"\0")
    recorded = (name for name in (*ROW_COLUMNS, *TOKEN_COLUMNS) if has_column(name, version))
    for name in ("offsets", "prompt_offsets", PROMPT_COLUMN, *recorded):
        values = getattr(rows, name)
        if name == "uid":
            state.update(json.dumps(list(values)).encode())
        else:
            state.update(np.ascontiguousarray(values, dtype=_NUMPY.get(name, np.dtype(np.int64))).data)
    for name, values in rows.extensions.items():
        state.update(name.encode() + b"\0")
        state.update(np.ascontiguousarray(values, dtype=np.float32).data)
    return state.hexdigest().encode()


def write(path: Path, rows: Rows, spec: Mapping[str, Any], reasons: Sequence[str], *, limit: float = math.inf) -> int:
    """Write a step's file; a reader never encounters a partial file.

    Args:
        limit: largest size in bytes.

    Returns:
        The file's size in bytes.

    Raises:
        OverLimit: the file would be larger than ``limit``.
        OSError: the disk is full, or the directory is not writable. After either error, no file is left.
    """
    partial = path.with_suffix(PARTIAL)
    try:
        # The old file is removed first, because Arrow would keep its permissions.
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
        pq.write_table(to_table(rows, spec, reasons), partial, compression=COMPRESSION, use_dictionary=_REPEATED)
        size = partial.stat().st_size
        if size > limit:
            raise OverLimit(f"{path}: {size} bytes, but {limit:g} are left.")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


def read(path: Path) -> Step:
    """Read one step's file.

    Raises:
        RecordingError: the file is not a recording, is truncated, has another schema version, or contradicts itself.
    """
    try:
        if not path.is_file():
            raise RecordingError(f"{path}: not a regular file. {ASIDE}")
        _check_size(path)
        # With pre_buffer, each column would be copied once more.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            metadata = file.schema_arrow.metadata or {}
            version = _read_version(path, metadata)
            extensions = (name for name in file.schema_arrow.names if name.startswith(EXTENSION_PREFIX))
            schema = extend_schema(extensions, version)
            _check_schema(path, file.schema_arrow, schema)
            # With only one CPU, this thread would merely wait for a reader thread.
            table = file.read(columns=schema.names, use_threads=pa.cpu_count() > 1)
            table.validate(full=True)
    except RecordingError:
        raise
    except MemoryError as error:
        raise RecordingError(f"{path}: does not fit into free memory. Read fewer steps.") from error
    except Exception as error:  # Arrow raises different types, depending on where it detects a contradiction
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors have no errno
            raise build_unreadable_error(path, error) from error
        raise RecordingError(f"{path}: not a readable Parquet file ({_first_line(error)}). {ASIDE}") from error
    spec = _json(path, metadata, SPEC_KEY, dict)
    reasons = _json(path, metadata, REASONS_KEY, list)
    if not all(isinstance(reason, str) for reason in reasons) or len(reasons) > MOST_REASONS:
        raise RecordingError(f"{path}: {REASONS_KEY.decode()} in its metadata is not a list of names. {ASIDE}")
    rows = _rows(path, table)
    unknown = int(rows.rejected_by.max(initial=0)) >> len(reasons)
    if unknown:
        raise RecordingError(f"{path}: rejected_by has bits beyond its {len(reasons)} reasons. {ASIDE}")
    if metadata.get(DIGEST_KEY) != compute_digest(rows, metadata):
        raise RecordingError(f"{path}: its content differs from what was recorded. {ASIDE}")
    return Step(rows, spec, tuple(reasons))


def count_rows(path: Path) -> int:
    """Count the rows of one step's file from its metadata, without reading them.

    Raises:
        RecordingError: the file is not a recording, or is truncated.
    """
    try:
        return read_declared_size(path).rows
    except DeclaredError as error:
        raise RecordingError(f"{path}: not a readable Parquet file ({error}). {ASIDE}") from error
    except OSError as error:
        raise build_unreadable_error(path, error) from error


def build_unreadable_error(path: Path, error: OSError) -> RecordingError:
    """Build the error for a file or directory that the operating system refuses to read."""
    proposed = "Fix its permissions" if isinstance(error, PermissionError) else "Fix that, or read a copy"
    return RecordingError(f"{path}: not readable ({error.strerror or _first_line(error)}). {proposed}.")


def _lists(offsets: NDArray[np.int64], values: NDArray[Any], name: str, schema: pa.Schema = SCHEMA) -> pa.Array:
    kind = schema.field(name).type
    return pa.ListArray.from_arrays(
        pa.array(offsets, type=pa.int32()), pa.array(values, type=kind.value_type), type=kind
    )


def _rows(path: Path, table: pa.Table) -> Rows:
    columns = {name: _join_chunks(table.column(name)) for name in table.column_names}
    for name, column in columns.items():
        if column.null_count or (pa.types.is_list(column.type) and column.flatten().null_count):
            raise RecordingError(f"{path}: {name} has a missing value. {ASIDE}")
    values: dict[str, Any] = {}
    for name in ROW_COLUMNS:
        values[name] = columns[name].to_numpy(zero_copy_only=False)
    values["prompt_offsets"], values["prompt_ids"] = _ragged(columns[PROMPT_COLUMN])
    extensions: dict[str, Any] = {}
    for name in (each for each in columns if each in TOKEN_COLUMNS or each.startswith(EXTENSION_PREFIX)):
        offsets, tokens = _ragged(columns[name])
        (values if name in TOKEN_COLUMNS else extensions)[name] = tokens
        if not np.array_equal(offsets, values.setdefault("offsets", offsets)):
            raise RecordingError(f"{path}: {name} and response_ids have different row lengths. {ASIDE}")
    ends = np.cumsum(np.append(False, values["response_mask"]), dtype=np.int32)[values["offsets"]]
    counted = np.diff(ends)
    if not np.array_equal(counted, values["length"]):
        raise RecordingError(f"{path}: length is not the count of response_mask. {ASIDE}")
    if "version" not in values:
        span = (values["oldest_version"], values["newest_version"])
        values["version"] = spread_versions(*span, values["response_mask"], values["offsets"])
    return Rows(**values, extensions=extensions)


def _join_chunks(column: pa.ChunkedArray) -> pa.Array:
    # combine_chunks would copy even a single chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _ragged(column: pa.ListArray) -> tuple[NDArray[np.int64], NDArray[Any]]:
    lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return np.concatenate([[0], np.cumsum(lengths)]), _view_writable(column.flatten())


def _view_writable(values: pa.Array) -> NDArray[Any]:
    """View values as a writable array, which torch requires for shared memory; Arrow itself would copy them."""
    buffer = values.buffers()[1]
    if not len(values) or pa.types.is_boolean(values.type) or not buffer.is_mutable:
        return values.to_numpy(zero_copy_only=False, writable=True)
    return np.frombuffer(buffer, values.type.to_pandas_dtype())[values.offset : values.offset + len(values)]


def _check_size(path: Path) -> None:
    says = read_declared_size(path)
    size = max(says.size, _WIDEST * says.values, _WIDEST * says.rows)
    most = min(LARGEST, max(SMALL, UNPACKED * path.stat().st_size))
    if size > most:
        raise RecordingError(f"{path}: declares an unpacked size of {size} bytes, more than {most}. {ASIDE}")


def _read_version(path: Path, metadata: Mapping[bytes, bytes]) -> int:
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise RecordingError(
            f"{path}: not a recording of offpolicy.record, {VERSION_KEY.decode()} is missing in its metadata."
        )
    known = {str(each).encode(): each for each in range(1, VERSION + 1)}
    if version not in known:
        raise RecordingError(
            f"{path}: schema {version.decode(errors='replace')[:20]}, but this release reads 1 to {VERSION}. "
            f"Read it with the release that wrote it."
        )
    return known[version]


def _check_schema(path: Path, schema: pa.Schema, expected: pa.Schema) -> None:
    for field in expected:
        index = schema.get_field_index(field.name)
        if index < 0:
            raise RecordingError(f"{path}: the column {field.name} is missing. {ASIDE}")
        if not schema.field(index).type.equals(field.type):
            kind = schema.field(index).type
            raise RecordingError(f"{path}: {field.name} has type {kind}, expected {field.type}. {ASIDE}")


def _json(path: Path, metadata: Mapping[bytes, bytes], key: bytes, kind: type) -> Any:
    try:
        value = json.loads(metadata.get(key, b""))
    # RecursionError is included, because a file may nest its JSON arbitrarily deeply.
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise RecordingError(f"{path}: {key.decode()} in its metadata is not readable. {ASIDE}")
    return value


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:200] or type(error).__name__
