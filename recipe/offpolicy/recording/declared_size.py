"""Unpacked size that a Parquet file declares, read from its metadata before anything is unpacked.

A few bytes can declare billions of values, because the counts are in the footer and in the header of each page, in
Thrift's compact protocol. pyarrow's metadata cannot limit the size, because it shows only the footer. Arrow, however,
unpacks what the page headers declare, even for a single row group. In addition, some contradictions in a column's
metadata abort the process (C++ abort) when it is read. tests/unit/recording contains a file for each of these two
problems; both exist in pyarrow 26.0.1.

Sources: parquet.thrift of apache/parquet-format; thrift/doc/specs/thrift-compact-protocol.md of apache/thrift.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"PAR1"
_DEEPEST, _MOST = 16, 1_000_000  # depth of nested structures, and entries of a list
_FOOTER = 16 * 2**20  # bytes
_HEADER = 4096
"""Largest size of a page header in bytes; the header contains statistics of the page."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12

Fields = dict[int, Any]
"""A Thrift structure: field number -> value."""


class DeclaredError(ValueError):
    """The file is not a Parquet file, or contradicts itself."""


@dataclass(frozen=True)
class DeclaredSize:
    """Declared rows and unpacked bytes over all columns and row groups.

    Attributes:
        rows: number of rows in all row groups.
        values: number of values in all pages.
        size: unpacked bytes of all pages.
    """

    rows: int
    values: int
    size: int


def read_declared_size(path: Path) -> DeclaredSize:
    """Read the declared size from the footer and page headers.

    Raises:
        DeclaredError: the metadata are invalid.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        footer = _read_footer(file)
        groups = _entries(footer, 4)
        rows = sum(_count(group, 3) for group in groups)
        pages = [page for group in groups for column in _entries(group, 1) for page in _read_pages(file, column)]
    return DeclaredSize(rows, sum(values for values, _ in pages), sum(size for _, size in pages))


def _read_footer(file: BinaryIO) -> Fields:
    end = file.seek(0, os.SEEK_END)
    # The magic number is at the start of the file; the file ends with the footer's length (4 bytes) and the magic
    # number again.
    if end < 12:
        raise DeclaredError("it is too short")
    file.seek(end - 8)
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or length > min(end - 12, _FOOTER):
        raise DeclaredError("its end is missing")
    file.seek(end - 8 - length)
    return _Compact(file.read(length)).structure()


def _read_pages(file: BinaryIO, column: Fields) -> Iterator[tuple[int, int]]:
    """Yield (values, unpacked bytes) of each page of a column chunk, as Arrow reads them."""
    chunk = column.get(3)
    if not isinstance(chunk, dict):
        raise DeclaredError("a column has no metadata")
    # ColumnMetaData of parquet.thrift: 5 num_values, 7 total_compressed_size, 9 data_, 11 dictionary_page_offset.
    dictionary = chunk.get(11, 0)
    place = dictionary if isinstance(dictionary, int) and dictionary > 0 else _count(chunk, 9)
    total, seen = _count(chunk, 5), 0
    end = place + _count(chunk, 7)
    while place < end and seen < total:
        file.seek(place)
        reader = _Compact(file.read(min(_HEADER, end - place)))
        header = reader.structure()
        # PageHeader: 2 and 3 sizes, 5 data page, 7 dictionary page (its values are not rows), 8 data page v2.
        values = [_count(header[key], 1) for key in (5, 7, 8) if isinstance(header.get(key), dict)]
        yield sum(values), _count(header, 2)
        seen += sum(values) if 7 not in header else 0
        place += reader.place + _count(header, 3)


def _count(fields: Fields, key: int) -> int:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DeclaredError(f"a count is missing or negative ({value!r:.20})")
    return value


def _entries(fields: Fields, key: int) -> list[Fields]:
    entries = fields.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DeclaredError("a list of structures is missing")
    return entries


class _Compact:
    """Reader of Thrift's compact protocol.

    Attributes:
        place: number of bytes read so far.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.place = 0

    def structure(self, depth: int = 0) -> Fields:
        fields: Fields = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._zigzag()
            kind &= 0x0F
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise DeclaredError("its metadata are nested too deeply")
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind < _DOUBLE:
            return self._zigzag()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            size_and_kind = self._byte()
            size = size_and_kind >> 4
            size = self._varint() if size == 15 else size
            return [self._value(size_and_kind & 0x0F, depth + 1) for _ in range(self._few(size))]
        if kind == _MAP:
            size = self._few(self._varint())
            kinds = self._byte() if size else 0
            return [(self._value(kinds >> 4, depth + 1), self._value(kinds & 0x0F, depth + 1)) for _ in range(size)]
        if kind == _STRUCT:
            return self.structure(depth + 1)
        raise DeclaredError(f"its metadata have a value of the unknown kind {kind}")

    def _few(self, size: int) -> int:
        if size > _MOST:
            raise DeclaredError(f"its metadata have a list of {size} entries")
        return size

    def _byte(self) -> int:
        # This is the most frequent read, so it avoids a slice.
        if self.place >= len(self._content):
            raise DeclaredError("its metadata end too early")
        self.place += 1
        return self._content[self.place - 1]

    def _bytes(self, size: int) -> bytes:
        found = self._content[self.place : self.place + size]
        if len(found) < size:
            raise DeclaredError("its metadata end too early")
        self.place += size
        return found

    def _varint(self) -> int:
        value = shift = 0
        # Ten groups of 7 bits hold 64 bits; without this limit, a file could make the loop arbitrarily long.
        while shift < 70:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise DeclaredError("its metadata have a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
