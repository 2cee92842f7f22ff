"""PostgreSQL's hash of byte strings.

In: an Arrow binary array, and a seed. Out: 64-bit numbers.

The function is Bob Jenkins' lookup3 over blocks of twelve bytes, as little-endian servers compute it:
hash_bytes_extended() in src/common/hashfn.c. All values are hashed together: first their first blocks, then their
second blocks, and so on. The values are sorted by length, the longest first. So the values that have an n-th block are
always at the beginning of the arrays.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets, Positions, UnsignedIntegers

#: One of the three words of each value's state. Their names are `a`, `b` and `c`, as in hashfn.c.
StateWords: TypeAlias = npt.NDArray[np.uint32]

_BLOCK_BYTES = 12
_INITIAL_STATE = 0x9E3779B9 + 3923095
_MIX_ROTATIONS = (4, 6, 8, 16, 19, 4)


def hash_bytes_extended(values: pa.Array, seed: int) -> UnsignedIntegers:
    """Hash binary values, none of them NULL; `seed` is an unsigned number of 64 bits."""
    octets = Octets(values)
    sizes = octets.ends - octets.starts
    order = np.argsort(-sizes, kind="stable")
    starts, sizes = octets.starts[order], sizes[order]
    a_words = (sizes + _INITIAL_STATE).astype(np.uint32)
    b_words, c_words = a_words.copy(), a_words.copy()
    if seed:
        a_words += np.uint32(seed >> 32)
        b_words += np.uint32(seed & 0xFFFFFFFF)
        _mix(a_words, b_words, c_words)
    block_counts = sizes // _BLOCK_BYTES
    # The number of values with a first block, with a second block, and so on.
    counts_by_block = len(block_counts) - np.searchsorted(
        block_counts[::-1], np.arange(1, block_counts.max(initial=0) + 1)
    )
    for block_index, value_count in enumerate(counts_by_block.tolist()):
        _add_block(
            octets,
            starts[:value_count],
            block_index,
            a_words[:value_count],
            b_words[:value_count],
            c_words[:value_count],
        )
        _mix(a_words[:value_count], b_words[:value_count], c_words[:value_count])
    _add_remainder(
        octets,
        starts + block_counts * _BLOCK_BYTES,
        sizes - block_counts * _BLOCK_BYTES,
        a_words,
        b_words,
        c_words,
    )
    _finalize(a_words, b_words, c_words)
    hashes = np.empty(len(order), np.uint64)
    hashes[order] = b_words.astype(np.uint64) << np.uint64(32) | c_words
    return hashes


def _add_block(
    octets: Octets,
    starts: Positions,
    block_index: int,
    a_words: StateWords,
    b_words: StateWords,
    c_words: StateWords,
) -> None:
    """Add the twelve bytes of one block."""
    offset, size = block_index * _BLOCK_BYTES, octets.buffer.size
    # Element n of this view has the two words that begin at byte n. So one lookup gets these words of all values.
    words = np.ndarray((size - offset - 7,), "<u8", octets.buffer, offset, (1,))[starts].view("<u4")
    a_words += words[0::2]
    b_words += words[1::2]
    c_words += np.ndarray((size - offset - 11,), "<u4", octets.buffer, offset + 8, (1,))[starts]


def _add_remainder(
    octets: Octets,
    positions: Positions,
    remaining_byte_counts: Positions,
    a_words: StateWords,
    b_words: StateWords,
    c_words: StateWords,
) -> None:
    """Add the bytes after the last full block, at most eleven; the lowest byte of `c_words` is reserved for the length."""
    words = _keep_first_bytes(
        octets.read_integers(positions).byteswap(), np.minimum(remaining_byte_counts, 8)
    )
    a_words += words.astype(np.uint32)
    b_words += (words >> np.uint64(32)).astype(np.uint32)
    words = _keep_first_bytes(
        octets.read_integers(positions + 8).byteswap(), np.maximum(remaining_byte_counts - 8, 0)
    )
    c_words += (words << np.uint64(8)).astype(np.uint32)


def _keep_first_bytes(words: UnsignedIntegers, byte_counts: Positions) -> UnsignedIntegers:
    """Set all bytes of each word except the first `byte_counts` to zero."""
    masks = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
    return words & masks[byte_counts]


def _rotate(words: StateWords, bits: int) -> StateWords:
    return words << np.uint32(bits) | words >> np.uint32(32 - bits)


def _mix(a_words: StateWords, b_words: StateWords, c_words: StateWords) -> None:
    """Mix the three words of each value in place."""
    for bits in _MIX_ROTATIONS:
        a_words -= c_words
        a_words ^= _rotate(c_words, bits)
        c_words += b_words
        a_words, b_words, c_words = b_words, c_words, a_words


def _finalize(a_words: StateWords, b_words: StateWords, c_words: StateWords) -> None:
    """Mix the three words of each value for the last time, in place."""
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c_words ^= b_words
        c_words -= _rotate(b_words, bits)
        a_words, b_words, c_words = b_words, c_words, a_words
