"""PostgreSQL's hash of byte strings: an Arrow binary array and a seed in, 64-bit numbers out.

The function is Bob Jenkins' lookup3 over blocks of twelve bytes, as little-endian servers compute it:
hash_bytes_extended() in src/common/hashfn.c. All values are hashed together, one block of each at a time. The
longest values come first, so the values that still have a block are always the first ones.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets, Positions, Words

State: TypeAlias = npt.NDArray[np.uint32]

_BLOCK = 12
_START = 0x9E3779B9 + 3923095
_MIX = (4, 6, 8, 16, 19, 4)
_LOW = np.uint64(0xFFFFFFFF)


def hash_bytes_extended(values: pa.Array, seed: int) -> Words:
    """Hash binary values, none of them NULL; `seed` is an unsigned number of 64 bits."""
    octets = Octets(values)
    sizes = octets.ends - octets.starts
    order = np.argsort(-sizes, kind="stable")
    starts, sizes = octets.starts[order], sizes[order]
    a = (sizes + _START).astype(np.uint32)
    b, c = a.copy(), a.copy()
    if seed:
        a += np.uint32(seed >> 32)
        b += np.uint32(seed & 0xFFFFFFFF)
        _mix(a, b, c)
    blocks = sizes // _BLOCK
    # The number of values that have a first block, a second block, and so on.
    remaining = len(blocks) - np.searchsorted(blocks[::-1], np.arange(1, blocks.max(initial=0) + 1))
    for block, count in enumerate(remaining.tolist()):
        _add(octets, starts[:count], block, a[:count], b[:count], c[:count])
        _mix(a[:count], b[:count], c[:count])
    _add_rest(octets, starts + blocks * _BLOCK, sizes - blocks * _BLOCK, a, b, c)
    _final(a, b, c)
    hashes = np.empty(len(order), np.uint64)
    hashes[order] = b.astype(np.uint64) << np.uint64(32) | c
    return hashes


def _add(octets: Octets, starts: Positions, block: int, a: State, b: State, c: State) -> None:
    """Add the twelve bytes of one block."""
    at, size = block * _BLOCK, octets.buffer.size
    # A view in which a word starts at every byte, so that words of all values are one lookup.
    words = np.ndarray((size - at - 7,), "<u8", octets.buffer, at, (1,))[starts].view("<u4")
    a += words[0::2]
    b += words[1::2]
    c += np.ndarray((size - at - 11,), "<u4", octets.buffer, at + 8, (1,))[starts]


def _add_rest(octets: Octets, positions: Positions, left: Positions, a: State, b: State, c: State) -> None:
    """Add the bytes after the last whole block, up to eleven.

    The lowest byte of `c` belongs to the length.
    """
    words = _first_bytes(octets.words(positions).byteswap(), np.minimum(left, 8))
    a += words.astype(np.uint32)
    b += (words >> np.uint64(32)).astype(np.uint32)
    words = _first_bytes(octets.words(positions + 8).byteswap(), np.maximum(left - 8, 0))
    c += (words << np.uint64(8)).astype(np.uint32)


def _first_bytes(words: Words, count: Positions) -> Words:
    """Keep the first `count` bytes of each word, up to eight, and set the others to zero."""
    masks = np.array([(1 << 8 * kept) - 1 for kept in range(9)], np.uint64)
    return words & masks[count]


def _rotated(x: State, by: int) -> State:
    return x << np.uint32(by) | x >> np.uint32(32 - by)


def _mix(a: State, b: State, c: State) -> None:
    """Mix the three words in place."""
    for by in _MIX:
        a -= c
        a ^= _rotated(c, by)
        c += b
        a, b, c = b, c, a


def _final(a: State, b: State, c: State) -> None:
    """Mix the three words for the last time."""
    for by in (14, 11, 25, 16, 4, 14, 24):
        c ^= b
        c -= _rotated(b, by)
        a, b, c = b, c, a
