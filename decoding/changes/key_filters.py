"""A filter of rows by hashes of their keys. It passes all rows that have one of the given keys, and few others.

It is a Bloom filter with one hash: each hash has a slot, and a bit says whether some key has this slot. With sixteen slots
for each key, at most a sixteenth of the other rows passes.

In: hashes of 32 bits. Out: bits, and masks of rows. Raises nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.arrays import Mask, Numbers
from pgsieve.decoding.changes.hashes import scale_hashes

_SLOTS_PER_KEY = 16


@dataclass(frozen=True)
class KeySlots:
    """The slots of the keys, divided into `range_count` ranges of `range_length` slots each."""

    range_count: int
    range_length: int

    @classmethod
    def make(cls, key_count: int, range_count: int) -> "KeySlots":
        """Make enough slots for `key_count` keys. The bits of a range fill whole bytes."""
        return cls(range_count, -(-max(key_count, 1) * _SLOTS_PER_KEY // (8 * range_count)) * 8)

    def find(self, hashes: npt.NDArray[np.uint64]) -> Numbers:
        """Find the slot of each key."""
        return scale_hashes(hashes, self.range_count * self.range_length)

    def divide(self, hashes: npt.NDArray[np.uint64]) -> list[Numbers]:
        """Find the slots of the keys in ascending order; a list of them for each range."""
        slots = np.sort(self.find(hashes))
        return np.split(slots, np.searchsorted(slots, self.range_length * np.arange(1, self.range_count)))

    def pack_range(self, number: int, slots: Sequence[Numbers]) -> bytes:
        """Return the bits of the range with this number; all `slots` are of this range."""
        is_taken = np.zeros(self.range_length, np.bool_)
        for some_slots in slots:
            is_taken[some_slots - number * self.range_length] = True
        return np.packbits(is_taken, bitorder="little").tobytes()


@dataclass(frozen=True)
class KeyFilter:
    """The filter: `bits` has the bits of all ranges one after the other, eight in each number."""

    slots: KeySlots
    bits: npt.NDArray[np.uint8]

    @classmethod
    def from_hashes(cls, hashes: npt.NDArray[np.uint64]) -> "KeyFilter":
        """Make the filter that passes these hashes."""
        slots = KeySlots.make(len(hashes), 1)
        return cls(slots, np.frombuffer(slots.pack_range(0, slots.divide(hashes)), np.uint8))

    def mask_passing(self, hashes: npt.NDArray[np.uint64]) -> Mask:
        """Return a mask of the keys that may be among the keys of the filter."""
        slots = self.slots.find(hashes)
        passes: Mask = (self.bits[slots >> 3] >> (slots & 7).astype(np.uint8) & 1).astype(np.bool_)
        return passes
