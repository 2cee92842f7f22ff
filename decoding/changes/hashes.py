"""Hashes of 32 bits, of keys and of rows.

In: Arrow tables and batches. Out: hashes, and hashes scaled to numbers below a count. Raises Arrow's errors.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.decoding.changes.equality import is_text_or_binary, measure_lengths, to_comparable, unify_floats

#: The factor of Horner's method, which combines the words (numbers of 64 bits) of all columns. It must be odd,
#: because a multiplication by an even number loses bits.
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def assign_key_parts(keys: pa.Table, part_count: int) -> Numbers:
    """Divide rows into `part_count` parts by their keys, and return the number of each row's part, from 0 on.

    Equal keys are in the same part, even if they come from different tables.
    """
    return scale_hashes(hash_keys(keys), part_count)


def scale_hashes(hashes: npt.NDArray[np.uint64], count: int) -> Numbers:
    """Scale hashes of 32 bits to numbers below `count`."""
    return (hashes * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def hash_keys(keys: pa.Table) -> npt.NDArray[np.uint64]:
    """Return a hash of 32 bits for each key. Equal keys have the same hash, even if they come from different tables."""
    hashes = np.zeros(keys.num_rows, np.uint64)
    for column in keys.columns:
        values = to_comparable(column).combine_chunks()
        for words in (_encode_as_words(values), *_encode_ends(values)):
            hashes = hashes * _HASH_FACTOR + words
            hashes ^= hashes >> np.uint64(29)
    return hashes * _HASH_FACTOR >> np.uint64(32)


def compute_row_marks(rows: pa.RecordBatch) -> npt.NDArray[np.uint32]:
    """Return the mark of each row: a hash that takes little time, for the module `digests`.

    It depends on the row's numbers and times, and on the lengths of its texts and lists, but not on their contents.
    """
    marks = np.zeros(rows.num_rows, np.uint64)
    for column in rows.columns:
        marks = marks * _HASH_FACTOR + _encode_as_words(column)
        marks = (marks ^ (marks >> np.uint64(29))) * _HASH_FACTOR
    return (marks >> np.uint64(32)).astype(np.uint32)


def _encode_as_words(column: pa.Array) -> npt.NDArray[np.uint64]:
    """Return a number for each value, also for NULL. Equal values get the same number."""
    lengths = measure_lengths(column)
    values = unify_floats(column, unify_zeros=False) if lengths is None else lengths
    values = values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values
    width = values.type.bit_width // 8
    words = values.view(pa.binary(width))
    is_valid = np.asarray(words.is_valid())
    octets = np.frombuffer(words.buffers()[1] or b"", np.uint8)[words.offset * width :][: len(words) * width]
    low_octets = np.zeros((len(words), 8), np.uint8)
    low_octets[:, : min(width, 8)] = octets.reshape(-1, width)[:, :8]
    return np.where(is_valid, low_octets.view(np.uint64)[:, 0] + np.uint64(1), np.uint64(0))


def _encode_ends(values: pa.Array) -> list[npt.NDArray[np.uint64]]:
    """Return the first and the last eight bytes of each text as numbers; an empty list for types of fixed width."""
    if not is_text_or_binary(values.type):
        return []
    values = values.cast(pa.large_binary())
    buffers = values.buffers()
    offsets = np.frombuffer(buffers[1], np.int64)[values.offset :][: len(values) + 1]
    # Thanks to the padding, eight bytes can be read from each value's beginning on, and eight before its end.
    padding = np.zeros(8, np.uint8)
    octets = np.concatenate([padding, np.frombuffer(buffers[2] or b"", np.uint8), padding])
    words = np.lib.stride_tricks.sliding_window_view(octets, 8)
    lengths = np.minimum(np.diff(offsets), 8).astype(np.uint64)
    # If a value has less than eight bytes, the word also has bytes of the next or the previous value. The shift removes
    # these.
    shift = np.minimum(np.uint64(8) * (np.uint64(8) - lengths), np.uint64(63))
    first_words = np.ascontiguousarray(words[offsets[:-1] + 8]).view("<u8")[:, 0] << shift
    last_words = np.ascontiguousarray(words[offsets[1:]]).view("<u8")[:, 0] >> shift
    return [np.where(lengths == 0, np.uint64(0), word) for word in (first_words, last_words)]
