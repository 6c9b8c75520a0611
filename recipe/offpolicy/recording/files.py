"""Recorded files: written atomically, and checked against their digest and declared size when read."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from .schema import (
    DIGEST_KEY,
    EXTENSION_PREFIX,
    FAST_DIGEST,
    PROMPT_COLUMN,
    REASONS_KEY,
    ROW_COLUMNS,
    SPEC_KEY,
    TOKEN_COLUMNS,
    VERSION,
    VERSION_KEY,
    Rows,
    compute_offsets,
    extend_schema,
    has_column,
    spread_versions,
)

COMPRESSION = "zstd"
_REPEATED = [
    *("step", "rank", "mini_batch", "uid", "oldest_version", "newest_version", "length"),
    *(f"{name}.list.element" for name in ("response_ids", "prompt_ids", "rejected_by", "turn", "version")),
]
"""Columns whose values repeat and are dictionary-encoded. Floats are written unchanged, so each NaN keeps its bits."""
SUFFIX, PARTIAL = ".parquet", ".partial"
"""Suffix of a finished file, and suffix of a file that is being written."""
PRIVATE, PRIVATE_DIRECTORY = 0o600, 0o700
"""File modes of recordings, under which prompts and responses are private to the owner."""
LARGEST = 8 * 2**30
"""Largest unpacked size of a file in bytes; a larger size is treated as an error or an attack."""
UNPACKED, SMALL = 200, 2**26
"""Largest ratio of unpacked size to file size, for files that unpack to more than ``SMALL`` bytes."""
MOST_REASONS = 32
"""Maximum number of parts of a correction that can reject: the number of bits of ``rejected_by``."""
_WIDEST = 8  # bytes of a value
_NUMPY = {
    name: np.dtype(kind.to_pandas_dtype())
    for name, (kind, _) in (ROW_COLUMNS | TOKEN_COLUMNS | {PROMPT_COLUMN: (pa.int32(), "")}).items()
    if kind != pa.string()
}


ASIDE = "Move it out of the directory; the other files can be read without it."
"""Fix for a damaged file."""


class RecordingError(ValueError):
    """A recording cannot be read; the message names the file, describes the problem, and says what to do."""


class OverLimit(RuntimeError):
    """A file would exceed its size limit."""


@dataclass(frozen=True)
class Step:
    """Record of one step, or of the updates in a step that used the same correction.

    Attributes:
        rows: its responses.
        spec: the correction that was active, in the form of ``CorrectionSpec.to_mapping``.
        reasons: parts that may have rejected a token; bit i of ``rows.rejected_by`` refers to reasons[i].
    """

    rows: Rows
    spec: Mapping[str, Any]
    reasons: tuple[str, ...]


def to_table(rows: Rows, spec: Mapping[str, Any], reasons: Sequence[str]) -> pa.Table:
    """Convert a step to an Arrow table."""
    if len(reasons) > MOST_REASONS:
        raise ValueError(f"{len(reasons)} parts of the correction can reject, but rejected_by has {MOST_REASONS} bits.")
    schema = extend_schema(rows.extensions)
    tokens = {name: getattr(rows, name) for name in TOKEN_COLUMNS} | dict(rows.extensions)
    lists = {PROMPT_COLUMN: (rows.prompt_offsets, rows.prompt_ids)}
    lists |= {name: (rows.offsets, values) for name, values in tokens.items()}
    columns = {name: pa.array(getattr(rows, name), type=kind) for name, (kind, _) in ROW_COLUMNS.items()}
    for name, (offsets, values) in lists.items():
        kind = schema.field(name).type
        starts, items = pa.array(offsets, type=pa.int32()), pa.array(values, type=kind.value_type)
        columns[name] = pa.ListArray.from_arrays(starts, items, type=kind)
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
    # Both hashes detect damage but not forgery, because anyone who can write a file can also write its digest.
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
    """Write a step's file atomically, so that a reader never sees a partial file.

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
            raise OverLimit(f"{path}: the file has {size} bytes, but only {limit:g} are left.")
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
            raise RecordingError(f"{path}: this is not a regular file. {ASIDE}")
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
    except (RecordingError, MemoryError):
        raise
    except Exception as error:  # Arrow raises different types, depending on where it detects a contradiction
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors have no errno
            raise build_unreadable_error(path, error) from error
        raise RecordingError(f"{path}: this is not a readable Parquet file ({_first_line(error)}). {ASIDE}") from error
    spec = _json(path, metadata, SPEC_KEY, dict)
    reasons = _json(path, metadata, REASONS_KEY, list)
    if not all(isinstance(reason, str) for reason in reasons) or len(reasons) > MOST_REASONS:
        raise RecordingError(f"{path}: {REASONS_KEY.decode()} in its metadata is not a list of names. {ASIDE}")
    rows = _rows(path, table)
    unknown = int(rows.rejected_by.max(initial=0)) >> len(reasons)
    if unknown:
        raise RecordingError(f"{path}: rejected_by has bits beyond its {len(reasons)} reasons. {ASIDE}")
    if metadata.get(DIGEST_KEY) != compute_digest(rows, metadata):
        raise RecordingError(f"{path}: the content does not match its recorded digest. {ASIDE}")
    return Step(rows, spec, tuple(reasons))


def count_rows(path: Path) -> int:
    """Count the rows of one step's file from its metadata, without reading them.

    Raises:
        RecordingError: the file is not a recording, or is truncated.
    """
    try:
        return read_declared_size(path).rows
    except DeclaredError as error:
        raise RecordingError(f"{path}: this is not a readable Parquet file ({error}). {ASIDE}") from error
    except OSError as error:
        raise build_unreadable_error(path, error) from error


def build_unreadable_error(path: Path, error: OSError) -> RecordingError:
    """Build the error for a file or directory that the operating system cannot read."""
    proposed = "Fix its permissions" if isinstance(error, PermissionError) else "Fix the cause, or read a copy"
    return RecordingError(f"{path} is not readable ({error.strerror or _first_line(error)}). {proposed}.")


def _rows(path: Path, table: pa.Table) -> Rows:
    # combine_chunks would copy even a single chunk.
    chunked = {name: table.column(name) for name in table.column_names}
    columns = {name: each.chunk(0) if each.num_chunks == 1 else each.combine_chunks() for name, each in chunked.items()}
    for name, column in columns.items():
        if column.null_count or (pa.types.is_list(column.type) and column.flatten().null_count):
            raise RecordingError(f"{path}: {name} has a missing value. {ASIDE}")
    values: dict[str, Any] = {name: columns[name].to_numpy(zero_copy_only=False) for name in ROW_COLUMNS}
    values["prompt_offsets"], values["prompt_ids"] = _ragged(columns[PROMPT_COLUMN])
    extensions: dict[str, Any] = {}
    for name in (each for each in columns if each in TOKEN_COLUMNS or each.startswith(EXTENSION_PREFIX)):
        offsets, tokens = _ragged(columns[name])
        (values if name in TOKEN_COLUMNS else extensions)[name] = tokens
        if not np.array_equal(offsets, values.setdefault("offsets", offsets)):
            raise RecordingError(f"{path}: {name} and response_ids have different row lengths. {ASIDE}")
    ends = np.cumsum(np.append(False, values["response_mask"]), dtype=np.int32)[values["offsets"]]
    if not np.array_equal(np.diff(ends), values["length"]):
        raise RecordingError(f"{path}: length differs from the number of tokens in response_mask. {ASIDE}")
    if "version" not in values:
        span = (values["oldest_version"], values["newest_version"])
        values["version"] = spread_versions(*span, values["response_mask"], values["offsets"])
    return Rows(**values, extensions=extensions)


def _ragged(column: pa.ListArray) -> tuple[NDArray[np.int64], NDArray[Any]]:
    return compute_offsets(column.value_lengths().to_numpy(zero_copy_only=False)), _view_writable(column.flatten())


def _view_writable(values: pa.Array) -> NDArray[Any]:
    """View values as a writable array, which torch requires for shared memory; Arrow itself would copy them."""
    buffer = values.buffers()[1]
    if not len(values) or pa.types.is_boolean(values.type) or not buffer.is_mutable:
        return values.to_numpy(zero_copy_only=False, writable=True)
    return np.frombuffer(buffer, values.type.to_pandas_dtype())[values.offset : values.offset + len(values)]


def _check_size(path: Path) -> None:
    rows, values, size = read_declared_size(path)
    size = max(size, _WIDEST * values, _WIDEST * rows)
    most = min(LARGEST, max(SMALL, UNPACKED * path.stat().st_size))
    if size > most:
        raise RecordingError(f"{path}: the file declares an unpacked size of {size} bytes, more than {most}. {ASIDE}")


def _read_version(path: Path, metadata: Mapping[bytes, bytes]) -> int:
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise RecordingError(
            f"{path}: this is not a recording of offpolicy.record: its metadata lacks {VERSION_KEY.decode()}."
        )
    known = {str(each).encode(): each for each in range(1, VERSION + 1)}
    if version not in known:
        shown = version.decode(errors="replace")[:20]
        fix = "Read it with the release that wrote it."
        raise RecordingError(f"{path} has schema {shown}, but this release reads schemas 1 to {VERSION}. {fix}")
    return known[version]


def _check_schema(path: Path, schema: pa.Schema, expected: pa.Schema) -> None:
    for field in expected:
        kind = schema.field(field.name).type if field.name in schema.names else "missing"
        if kind != field.type:
            raise RecordingError(f"{path}: {field.name} is {kind}, expected {field.type}. {ASIDE}")


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


MAGIC = b"PAR1"
_FOOTER = 16 * 2**20  # bytes
_HEADER = 4096  # bytes, with statistics of the page
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12  # parquet.thrift has no others
Fields = dict[int, Any]  # a Thrift structure: field number -> value


class DeclaredError(ValueError):
    """The file is not a Parquet file, or contradicts itself."""


class DeclaredSize(NamedTuple):
    """Declared number of rows, number of values in all pages, and unpacked bytes of all pages."""

    rows: int
    values: int
    size: int


def read_declared_size(path: Path) -> DeclaredSize:
    """Read the declared size from the footer and page headers, before anything is unpacked.

    A few bytes can declare billions of values, because the counts are in the footer and in the header of each page.
    pyarrow's metadata cannot limit the size, because it shows only the footer, but Arrow unpacks what the page headers
    declare. In addition, some contradictions in a column's metadata abort the process (C++ abort) when it is read. Both
    problems exist in pyarrow 26.0.1.

    Sources: parquet.thrift of apache/parquet-format; thrift/doc/specs/thrift-compact-protocol.md of apache/thrift.

    Raises:
        DeclaredError: the metadata is invalid.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            groups = _read_footer(file)[4]
            rows = sum(_count(group, 3) for group in groups)
            pages = [page for group in groups for column in group[1] for page in _read_pages(file, column[3])]
        # Wrong offsets, counts or types of values raise these exceptions.
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
            raise DeclaredError(f"its metadata is not valid: {type(error).__name__}") from error
    return DeclaredSize(rows, sum(values for values, _ in pages), sum(size for _, size in pages))


def _read_footer(file: BinaryIO) -> Fields:
    end = file.seek(0, os.SEEK_END)
    # The file ends with the footer's length (4 bytes) and the magic number, with which it also begins.
    file.seek(max(end - 8, 0))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if end < 12 or tail[4:] != MAGIC or length > min(end - 12, _FOOTER):
        raise DeclaredError("its end is missing")
    file.seek(end - 8 - length)
    return _Compact(file.read(length)).structure()


def _read_pages(file: BinaryIO, chunk: Fields) -> Iterator[tuple[int, int]]:
    """Yield (values, unpacked bytes) of each page of a column chunk, as Arrow reads them."""
    # ColumnMetaData of parquet.thrift: 5 num_values, 7 total_compressed_size, 9 data_, 11 dictionary_page_offset.
    place = (_count(chunk, 11) if 11 in chunk else 0) or _count(chunk, 9)
    total, seen, end = _count(chunk, 5), 0, place + _count(chunk, 7)
    while place < end and seen < total:
        file.seek(place)
        reader = _Compact(file.read(min(_HEADER, end - place)))
        header = reader.structure()
        # PageHeader: 2 and 3 sizes, 5 data page, 7 dictionary page (its values are not rows), 8 data page v2.
        values = sum(_count(header[key], 1) for key in (5, 7, 8) if key in header)
        yield values, _count(header, 2)
        seen += values if 7 not in header else 0
        place += reader.place + _count(header, 3)


def _count(fields: Fields, key: int) -> int:
    value = fields[key]
    if type(value) is not int or value < 0:  # a bool is not a count
        raise DeclaredError(f"a count is negative or not a number ({value!r:.20})")
    return value


class _Compact:
    """Reader of Thrift's compact protocol; ``place`` is the number of bytes read so far.

    Every value takes at least one byte, so the number of values is limited by the content, beyond which an IndexError
    is raised.
    """

    def __init__(self, content: bytes) -> None:
        self._content, self.place = content, 0

    def structure(self) -> Fields:
        fields: Fields = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._zigzag()
            kind &= 0x0F
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind < _DOUBLE:
            return self._zigzag()
        if kind in (_DOUBLE, _BINARY):
            size = 8 if kind == _DOUBLE else self._varint()
            self.place += size
            return self._content[self.place - 1]
        if kind == _LIST:
            size_and_kind = self._byte()
            size = size_and_kind >> 4
            return [self._value(size_and_kind & 0x0F) for _ in range(self._varint() if size == 15 else size)]
        if kind == _STRUCT:
            return self.structure()
        raise DeclaredError(f"its metadata has a value of the unknown kind {kind}")

    def _byte(self) -> int:
        self.place += 1
        return self._content[self.place - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):  # ten groups of 7 bits hold 64 bits
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise DeclaredError("its metadata has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
