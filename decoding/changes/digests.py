"""Digests of the rows of a table without a key.

In: rows. Out: 20 bytes per row. Two rows have the same digest if all of their values are equal. Raises Arrow's errors.

Here values are equal if they have the same text: NULL equals NULL, all NaN are equal, and 0.0 does not equal -0.0.
So a DELETE removes a row of the replica that has the same text as PostgreSQL's row.

A digest is a mark of 32 bits, followed by 128 bits of BLAKE2b. The mark is a simple hash, and takes much less time than
BLAKE2b. If rows with certain digests are wanted, BLAKE2b is computed only for the rows whose mark is one of the wanted
marks.

https://www.rfc-editor.org/rfc/rfc7693
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.decoding.changes.columns import SIDES, struct_field
from pgsieve.decoding.changes.equality import encode_rows
from pgsieve.decoding.changes.hashes import compute_row_marks
from pgsieve.decoding.changes.key_filters import KeyFilter

#: The schema of digests.
DIGEST_SCHEMA = pa.schema([("digest", pa.binary())])
_BLAKE_BYTES, _MARK_BYTES = 16, 4
#: The number of rows that are digested together.
_ROWS_PER_STEP = 16_384


def compute_row_digests(rows: pa.RecordBatch) -> pa.Table:
    """Return the digest of each row."""
    parts = [
        _hash_rows(rows.slice(begin, _ROWS_PER_STEP)) for begin in range(0, rows.num_rows, _ROWS_PER_STEP)
    ]
    hashes = np.concatenate([np.empty((0, _BLAKE_BYTES), np.uint8), *parts])
    digests = np.hstack([compute_row_marks(rows).view(np.uint8).reshape(-1, _MARK_BYTES), hashes])
    offsets = np.arange(rows.num_rows + 1, dtype=np.int32) * digests.shape[1]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digests))]
    return pa.table([pa.Array.from_buffers(pa.binary(), rows.num_rows, buffers)], schema=DIGEST_SCHEMA)


def find_marks(digests: pa.Table) -> npt.NDArray[np.uint32]:
    """Find the mark of each digest; `digests` has the schema `DIGEST_SCHEMA`."""
    octets = _to_numpy(digests).view(np.uint8).reshape(digests.num_rows, -1)[:, :_MARK_BYTES]
    return np.ascontiguousarray(octets).view(np.uint32)[:, 0]


def digest_sides(changes: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Replace the rows `old` and `new` of changes by their digests, computed from these columns."""
    arrays = {name: changes.column(name) for name in changes.schema.names}
    for side in SIDES:
        arrays[side] = _digest_side(arrays[side], columns)
    return pa.RecordBatch.from_pydict(arrays)


@dataclass(frozen=True)
class WantedDigests:
    """Distinct digests whose rows are wanted.

    Spark sends objects of this class to executors. Each executor makes an index of the digests.
    """

    digests: pa.Table
    # Not a cached_property: before Python 3.12 it has a lock, and a class with a lock cannot be sent to executors.
    _index: list[_DigestIndex] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.digests.num_rows)

    def __reduce__(self) -> tuple[type[WantedDigests], tuple[pa.Table]]:
        return WantedDigests, (self.digests,)

    def find_rows(self, rows: pa.RecordBatch) -> tuple[Numbers, Numbers]:
        """Return the indexes of the rows that have one of the digests, in order, and the indexes of their digests."""
        if not self._index:
            self._index.append(_DigestIndex.from_digests(self.digests))
        index, marks = self._index[0], compute_row_marks(rows)
        row_indexes = np.flatnonzero(index.filter.mask_passing(marks.astype(np.uint64)))
        # The filter passes some other marks, too. A search for the marks takes less time than digesting all these rows.
        positions = np.minimum(np.searchsorted(index.marks, marks[row_indexes]), len(index.marks) - 1)
        row_indexes = row_indexes[index.marks[positions] == marks[row_indexes]]
        if not len(row_indexes):
            return row_indexes, row_indexes
        candidates = _to_numpy(compute_row_digests(rows.take(pa.array(row_indexes))))
        positions = np.minimum(np.searchsorted(index.octets, candidates), len(index.octets) - 1)
        is_wanted = index.octets[positions] == candidates
        return row_indexes[is_wanted], index.order[positions[is_wanted]]


class _DigestIndex(NamedTuple):
    """An index of wanted digests.

    - `octets` has the digests in ascending order, `order` their indexes before sorting, and `marks` the sorted marks.
    - `filter` passes the marks, and few others.
    """

    octets: npt.NDArray[np.bytes_]
    order: Numbers
    marks: npt.NDArray[np.uint32]
    filter: KeyFilter

    @classmethod
    def from_digests(cls, digests: pa.Table) -> _DigestIndex:
        """Make the index of digests."""
        octets, marks = _to_numpy(digests), np.sort(find_marks(digests))
        order = np.argsort(octets)
        return cls(octets[order], order, marks, KeyFilter.from_hashes(marks.astype(np.uint64)))


def _to_numpy(digests: pa.Table) -> npt.NDArray[np.bytes_]:
    octets = digests["digest"].combine_chunks().cast(pa.binary(_MARK_BYTES + _BLAKE_BYTES))
    width = octets.type.byte_width
    return np.frombuffer(octets.buffers()[1] or b"", f"S{width}")[octets.offset :][: len(octets)]


def _digest_side(rows: pa.StructArray, columns: Sequence[str]) -> pa.StructArray:
    valid_indexes = np.flatnonzero(rows.is_valid())
    valid_rows = rows if len(valid_indexes) == len(rows) else rows.take(pa.array(valid_indexes))
    values = pa.RecordBatch.from_arrays(
        [struct_field(valid_rows, name) for name in columns], names=list(columns)
    )
    digests = compute_row_digests(values).combine_chunks()
    digest_indexes = np.full(len(rows), -1, np.int64)
    digest_indexes[valid_indexes] = np.arange(len(valid_indexes))
    children = [column.combine_chunks() for column in digests.columns]
    packed_digests = pa.StructArray.from_arrays(children, fields=list(DIGEST_SCHEMA))
    return (
        packed_digests
        if len(valid_indexes) == len(rows)
        else packed_digests.take(pa.array(digest_indexes, mask=digest_indexes < 0))
    )


def _hash_rows(rows: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    encodings = encode_rows(rows, unify_zeros=False).to_pylist()
    hashes = b"".join([blake2b(encoding, digest_size=_BLAKE_BYTES).digest() for encoding in encodings])
    return np.frombuffer(hashes, np.uint8).reshape(-1, _BLAKE_BYTES)
