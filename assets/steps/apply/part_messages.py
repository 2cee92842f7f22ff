"""The messages by which tasks exchange keys, places and rows, when they apply a batch divided by its keys.

A batch is the changes that one commit applies. A place is a number that orders the changes of a batch. A `KeyReader`
sends changes, and rows of the replica's files, to deciders. A decider is the task that finds out which rows of its part
of the keys are added and removed (`part_deciders`). It sends the places of changes and the numbers of rows
to `PartWriter`.

In: messages, which are bytes. Out: Arrow tables, and the changes of a part by key. Raises Arrow's errors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.unordered_changes import UnorderedChanges, join_changes
from pgsieve.decoding.changes.arrays import Mask, Numbers
from pgsieve.decoding.changes.keys import SoughtKeys
from pgsieve.decoding.changes.metadata_columns import Metadata
from pgsieve.resources.parts import Message, make_message

#: A message with TRUNCATEs has this in place of the number of its sender.
TRUNCATES_SENDER = -1
#: In a message to a writer, one of these takes the place of the sender's number. It says what the message is about: rows to
#: write or to remove (`ROWS`), or deleted rows that a replica keeps, with their metadata (`ENDED_ROWS`). Messages about rows
#: whose key an UPDATE changes (`LEFT_ROWS`) go to no writer: `moved_rows` handles them.
ROWS, ENDED_ROWS, LEFT_ROWS = range(3)
#: For a replica with a change data feed, messages about rows to write or to remove have this column. It says whether the
#: batch both removes a row of the key and adds one.
IS_UPDATE = "is_update"
_TRUNCATE_SCHEMA = pa.schema([("commit_lsn", pa.int64()), ("ordinal", pa.int64())])
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class PartMatches:
    """The rows of a file with keys of a part: their numbers, the numbers of their keys, and the mask of living rows.

    A row lives if it is not marked as deleted.
    """

    row_numbers: Numbers
    key_numbers: Numbers
    is_living: Mask

    @property
    def living_keys(self) -> Numbers:
        """The numbers of the keys of living rows."""
        return self.key_numbers[self.is_living]


@dataclass(frozen=True)
class ReceivedChanges:
    """What `KeyReader`s have sent to one part.

    - `changes`: tables of changes, each with the number of the task that read it
    - `truncates`: the TRUNCATEs
    - `rows_by_sender`: tables of the rows of the replica's files, by the number of the task that read the file. The
      receiver with the same number changes the file.
    """

    changes: Sequence[tuple[int, pa.Table]]
    truncates: pa.Table
    rows_by_sender: Mapping[int, Sequence[pa.Table]]

    @classmethod
    def unpack(cls, messages: Sequence[Message], change_part_count: int) -> "ReceivedChanges":
        """Unpack messages; the changes are divided into `change_part_count` parts."""
        tables_by_sender = defaultdict[int, list[pa.Table]](list)
        for sender, content in messages:
            tables_by_sender[sender].append(_unpack(content))
        truncates = tables_by_sender.pop(TRUNCATES_SENDER, [_TRUNCATE_SCHEMA.empty_table()])
        changes = [
            (sender, table)
            for sender, tables in tables_by_sender.items()
            if sender < change_part_count
            for table in tables
        ]
        rows = {sender: tables for sender, tables in tables_by_sender.items() if sender >= change_part_count}
        return cls(changes, pa.concat_tables(truncates), rows)

    def join(self, unsent_columns: Sequence[str] = (), soft_delete_columns: Metadata = ()) -> KeyedChanges:
        """Bring the changes into order; the parameters are those of `make_keyed_changes`.

        In the result metadata columns are called m0, m1, …, as in the messages.
        """
        changes = _unpack_changes([table for _, table in self.changes], self.truncates)
        metadata = [(f"m{number}", kind) for number, (_, kind) in enumerate(soft_delete_columns)]
        return join_changes([changes], unsent_columns, metadata)

    def find_matches(self, keys: pa.Table) -> dict[int, PartMatches]:
        """Find the rows with these keys, by the number of the receiver that changes their file."""
        sought_keys, matches = SoughtKeys.from_keys(number_key_columns(keys)), dict[int, PartMatches]()
        for sender, tables in self.rows_by_sender.items():
            table = pa.concat_tables(tables)
            row_indices, found_keys = sought_keys.find_rows(table.select(sought_keys.keys.column_names))
            rows = table.select(["row", "is_living"]).take(pa.array(row_indices))
            matches[sender] = PartMatches(np.asarray(rows["row"]), found_keys, np.asarray(rows["is_living"]))
        return matches

    def find_row_numbers(self, number: int) -> Numbers:
        """Find the numbers of all rows of the file that the receiver with this number changes."""
        return np.concatenate([np.asarray(table["row"]) for table in self.rows_by_sender[number]])

    def find_other_living_rows(self, sender: int, match: PartMatches) -> Numbers:
        """Find the numbers of a file's living rows to whose keys no change belongs; `match` has the other rows."""
        table = pa.concat_tables(self.rows_by_sender[sender])
        return np.setdiff1d(np.asarray(table["row"])[np.asarray(table["is_living"])], match.row_numbers)

    def make_place_messages(self, kind: int, places: Numbers, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield a message to each task that writes changes at some of these places.

        `rows` has a row for each place.
        """
        receivers = self._find_parts(places)
        for receiver in np.unique(receivers).tolist():
            yield make_message(receiver, kind, pack(rows.filter(pa.array(receivers == receiver))))

    def _find_parts(self, places: Numbers) -> Numbers:
        """Find the number of the part of the changes that has each of `places`."""
        all_places = np.concatenate([np.asarray(table["place"]) for _, table in self.changes])
        parts = np.repeat([part for part, _ in self.changes], [table.num_rows for _, table in self.changes])
        order = np.argsort(all_places)
        return np.asarray(parts[order][np.searchsorted(all_places[order], places)])


def _unpack_changes(tables: Sequence[pa.Table], truncates: pa.Table) -> UnorderedChanges:
    """Unpack the changes that `KeyReader` has sent.

    Without a TRUNCATE, `KeyReader` sends no LSN and no ordinal: they only tell whether a change is before the TRUNCATE.
    """
    rows = pa.concat_tables(tables)
    keys = rows.select([name for name in rows.column_names if name.startswith("k")])
    lsns, ordinals = (
        np.asarray(rows[name]) if name in rows.column_names else np.zeros(rows.num_rows, np.int64)
        for name in ("lsn", "ordinal")
    )
    places, operations = np.asarray(rows["place"]), np.asarray(rows["operation"])
    no_keys, metadata_columns = keys.slice(0, 0), [name for name in rows.column_names if name.startswith("m")]
    sent_masks = [np.asarray(rows[name]) for name in rows.column_names if name.startswith("sent")]
    return UnorderedChanges(
        places,
        lsns,
        ordinals,
        operations,
        keys,
        _NO_ROWS,
        no_keys,
        sent_masks,
        rows.select(metadata_columns),
        truncates,
    )


def number_key_columns(keys: pa.Table) -> pa.Table:
    """Rename the key's columns to k0, k1, …, so that columns such as `place` can be added."""
    return keys.rename_columns([f"k{number}" for number in range(keys.num_columns)])


def pack(rows: pa.Table) -> pa.Buffer:
    """Make the content of a message from rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def unpack_rows(messages: Sequence[Message], kind: int, number_column: str) -> pa.Table:
    """Unpack the messages of one kind, in the order of a column."""
    tables = [_unpack(content) for message_kind, content in messages if message_kind == kind]
    return pa.concat_tables(tables).sort_by(number_column)


def _unpack(content: pa.Buffer) -> pa.Table:
    return pa.ipc.open_stream(content).read_all()
