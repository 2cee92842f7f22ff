"""The tasks that make a filter of the keys of very many changes (`pgsieve.decoding.changes.key_filters`).

A table may have many more rows than a batch has changes. Tasks that read the table's files then send only rows that the
filter passes. A batch is the changes that one commit applies. The slot of a key is the place of its bit in the filter.

    SlotReader, a part of the changes ──── slots of a range ────► KeyFilterBuilder, the bits of a range ────► the driver

In: row groups of a change history (the Delta table with all changes of a table). Out: rows of `SLOT_RANGE_SCHEMA`. Raises
OSError, and Arrow's errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.key_reader import KeyReader
from pgsieve.decoding.changes.key_filters import KeySlots
from pgsieve.resources.parts import Guard, Message, make_message

#: A range of slots: its number, and its bits, eight in each byte.
SLOT_RANGE_SCHEMA = pa.schema([("range", pa.int64()), ("bits", pa.binary())])


@dataclass(frozen=True)
class SlotReader:
    """Reads the keys of the changes by `reader`, and sends their slots, one message for each range of slots."""

    reader: KeyReader
    slots: KeySlots

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Send the slots of a part of the changes."""
        yield from guard(self._send_slots(number))

    def _send_slots(self, number: int) -> Iterator[pa.RecordBatch]:
        for table in self.reader.read_changes(number):
            hashes = self.reader.hash_keys(self.reader.extract_changes(table).keys)
            for range_number, slots in enumerate(self.slots.divide(hashes)):
                if len(slots):
                    yield make_message(range_number, number, slots.tobytes())


@dataclass(frozen=True)
class KeyFilterBuilder:
    """Makes the bits of a range from its slots."""

    slots: KeySlots

    def __call__(
        self, range_number: int, messages: Sequence[Message], guard: Guard
    ) -> Iterator[pa.RecordBatch]:
        """Make a row of `SLOT_RANGE_SCHEMA`."""
        bits = self.slots.pack_range(
            range_number, [np.frombuffer(content, np.int64) for _, content in messages]
        )
        yield from guard(
            [pa.RecordBatch.from_pylist([{"range": range_number, "bits": bits}], SLOT_RANGE_SCHEMA)]
        )
