"""Rows of parquet files in bounded memory, whatever a small file expands to.

A parquet file may be hundreds of bytes long and hold hundreds of gigabytes: 20,000 rows that all point to one text of
8 MiB in a dictionary, a page of one letter that zstd packs 10,000-fold, a list of a billion equal numbers. So texts are
read as indices into their dictionary, rows become Python objects only in slices whose size is known beforehand, and
the footer is checked before any of it is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.storage.remote import arrow_source

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_AT_ONCE = 1024
SLICE_BYTES = 64 << 20
"""Decoded bytes of the rows that become Python objects at once, and the most of a single row."""
PAGE_BYTES = 256 << 20
PAGE_RATIO = 200
"""A column of a row group with more bytes that packs better than this is refused: English text packs about 3-fold."""
MOST_VALUES = 1 << 28
VALUES_PER_BYTE = 64
"""A column of a row group with more values, and more of them per encoded byte, is refused: a list without an end."""
DECODED_BYTES = 1 << 30
DECODED_RATIO = 1000
"""A row group whose rows decode to more than this, and to this many times its encoded size, repeats a few texts."""
PREFIXES = "DELTA_BYTE_ARRAY"
"""Texts as what they share with the one before: each of them may be as long as the whole column chunk."""


class Expands(Exception):
    """A row group that expands to far more than the file holds; the message says what does."""


def read_batches(path: str, groups: range, columns: Sequence[str] | None) -> Iterator[list[Any] | int]:
    """Yield the rows of some row groups in order, in lists; an int is that many rows too large to be decoded.

    columns: names of top-level columns, None for all. Raise Expands if a row group declares an expansion that no text
    has, before it is unpacked, or once its rows have shown it.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(arrow_source(path)) as footer:
        metadata = footer.metadata
    leaves = [
        index
        for index in range(metadata.num_columns)
        if columns is None or metadata.schema.column(index).path.split(".")[0] in columns
    ]
    texts = [
        metadata.schema.column(index).path
        for index in leaves
        if metadata.schema.column(index).physical_type == "BYTE_ARRAY"
    ]
    with pq.ParquetFile(arrow_source(path), read_dictionary=texts) as file:
        for group in groups:
            chunks = [metadata.row_group(group).column(index) for index in leaves]
            _check(chunks)
            encoded, decoded = sum(chunk.total_uncompressed_size for chunk in chunks), 0
            for batch in file.iter_batches(_rows_at_once(chunks), row_groups=[group], columns=columns):
                sizes = sum((_sizes(column) for column in batch.columns), np.zeros(len(batch), np.int64))
                decoded += int(sizes.sum())
                if decoded > max(DECODED_BYTES, DECODED_RATIO * encoded):
                    raise Expands(
                        f"{encoded:,} bytes decode to more than {decoded:,}, over {DECODED_RATIO:,} times as many"
                    )
                yield from _slices(batch, sizes)


def _check(chunks: Sequence[pq.ColumnChunkMetaData]) -> None:
    for chunk in chunks:
        size, packed, values = chunk.total_uncompressed_size, chunk.total_compressed_size, chunk.num_values
        if size > PAGE_BYTES and size > PAGE_RATIO * packed:
            raise Expands(
                f"column '{chunk.path_in_schema}' expands from {packed:,} to {size:,} bytes, more than "
                f"{PAGE_RATIO}-fold"
            )
        if values > MOST_VALUES and values > VALUES_PER_BYTE * size:
            raise Expands(
                f"column '{chunk.path_in_schema}' holds {values:,} values in {size:,} bytes; write smaller row groups"
            )


def _rows_at_once(chunks: Sequence[pq.ColumnChunkMetaData]) -> int:
    longest = max((c.total_uncompressed_size for c in chunks if PREFIXES in c.encodings), default=1)
    return max(1, min(ROWS_AT_ONCE, SLICE_BYTES // max(1, longest)))


def _slices(batch: pa.RecordBatch, sizes: np.ndarray) -> Iterator[list[Any] | int]:
    """Yield the rows of a batch in lists of at most SLICE_BYTES decoded; a row that alone has more is not decoded."""
    if int(sizes.sum()) <= SLICE_BYTES:
        yield batch.to_pylist()
        return
    first, filled = 0, 0
    for row, size in enumerate(sizes.tolist()):
        if filled + size > SLICE_BYTES:
            if first < row:
                yield batch.slice(first, row - first).to_pylist()
            first, filled = row, 0
        if size > SLICE_BYTES:
            yield 1
            first = row + 1
        else:
            filled += size
    if first < len(batch):
        yield batch.slice(first).to_pylist()


def _sizes(array: Any) -> np.ndarray:
    """(n,) bytes of each element once it is decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = array.type
    if types.is_dictionary(kind):
        lengths = np.append(_sizes(array.dictionary), 0)  # the last is for nulls
        return lengths[pc.fill_null(array.indices, len(lengths) - 1).to_numpy(zero_copy_only=False)]
    if types.is_struct(kind):
        return sum((_sizes(part) for part in array.flatten()), np.zeros(len(array), np.int64))
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        parts = [array.keys, array.items] if types.is_map(kind) else [array.values]
        inner = sum((_sizes(part) for part in parts), np.zeros(len(parts[0]), np.int64))
        before = np.concatenate([[0], np.cumsum(inner)])
        return np.diff(before[array.offsets.to_numpy(zero_copy_only=False)])
    if types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind):
        return pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    width = kind.bit_width // 8 if isinstance(kind, pa.DataType) and _has_width(kind) else 8
    return np.full(len(array), max(1, width), np.int64)


def _has_width(kind: Any) -> bool:
    try:
        return bool(kind.bit_width)
    except ValueError:  # a type of variable width
        return False
