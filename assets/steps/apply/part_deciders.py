"""The tasks that decide very many changes, divided into parts by their keys.

To decide the changes of a key is to find out which of its rows are removed and which are written. The work has three
stages: `KeyReader` (`key_reader`), `KeyDecider`, and `PartWriter` (`part_writer`). The tasks of a stage yield
messages. Each task of the next stage is a receiver, and gets the messages with its number (`pgsieve.resources.parts`).
A batch is the changes that one commit applies. A move is an UPDATE that changes the key. For moves that did not send
all values, `moved_rows` adds stages before the last one. A place is a number that orders the changes of a batch. It
also identifies the new row of its change.

In a table without a key, the digest of the whole row is the key, and a `MultisetDecider` decides each part: several rows
may have the same digest.

In: messages of `KeyReader`. Out: messages to `PartWriter`: the changes that have new rows, and the rows to remove.
`by_key_parts` starts the tasks, and commits what they have written. Raises Arrow's errors.

    row groups of changes ─┐ keys                         ┌─ places ──► new files
                           ├───────► the net change of ───┤
    files of the replica ──┘         a part of the keys   └─ rows ────► files without them, or deletion vectors
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.ended_rows import RowEndings
from pgsieve.assets.steps.apply.key_reader import BatchParts
from pgsieve.assets.steps.apply.keyed_changes import ChangesOutcome, KeyedChanges
from pgsieve.assets.steps.apply.keyless_changes import KeylessChanges
from pgsieve.assets.steps.apply.part_messages import (
    ENDED_ROWS,
    IS_UPDATE,
    LEFT_ROWS,
    ROWS,
    PartMatches,
    ReceivedChanges,
    pack,
)
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.key_changes import LEAVE
from pgsieve.decoding.changes.multiset import compute_multiset_change, mask_first_occurrences
from pgsieve.decoding.changes.net_change import find_left_rows
from pgsieve.decoding.changes.net_rows import NetRows, describe_left_rows, find_net_rows
from pgsieve.decoding.changes.tenures import find_moves_without_row
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.parts import Guard, Message, make_message

#: The columns that tasks return: a row per new file, or a row with only `result`, a JSON text (counts, changed files).
RESULT_SCHEMA = FILE_SCHEMA.append(pa.field("result", pa.string()))
#: If more moves of a part than this find no row to move, the part reports that the changes cannot be applied by parts.
_MAX_LOST_PLACES = 100_000


@dataclass(frozen=True)
class PartDecider(ABC):
    """Decides the changes of a part of the keys, and sends messages to the receivers that write.

    `empties_replica` is True if a TRUNCATE removes all rows that the replica had.
    """

    batch_parts: BatchParts
    empties_replica: bool

    def __call__(self, _: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Decide the changes that readers have sent to one part."""
        received = ReceivedChanges.unpack(messages, self.batch_parts.change_part_count)
        if self._has_work(received):
            yield from guard(self._decide(received))

    def _has_work(self, received: ReceivedChanges) -> bool:
        """Whether the part has something to decide."""
        return bool(received.changes)

    @abstractmethod
    def _decide(self, received: ReceivedChanges) -> Iterator[pa.RecordBatch]: ...

    def _compute_outcome(
        self, received: ReceivedChanges
    ) -> tuple[KeyedChanges, Mapping[int, PartMatches], ChangesOutcome]:
        """Compute what the changes of a part do to a table with a key, from the rows of the replica that they find."""
        batch_parts = self.batch_parts
        keyed_changes = received.join(batch_parts.unsent_columns, batch_parts.soft_delete_columns)
        matches = received.find_matches(keyed_changes.keys)
        outcome = keyed_changes.decide(
            (match.living_keys for match in matches.values()), empties_replica=self.empties_replica
        )
        return keyed_changes, matches, outcome

    def _find_refusal(
        self, keyed_changes: KeyedChanges, outcome: ChangesOutcome
    ) -> Mapping[str, object] | None:
        """Return a result that says why the changes cannot be applied; None if they can. The table has a key."""
        if self.batch_parts.has_moves:
            moves = find_moves_without_row(keyed_changes.effective_changes, outcome.had_row)
            if len(lost_places := self._find_new_places(keyed_changes.effective_places[moves])):
                return describe_lost_places(lost_places)
        return {"counts": {"refused": 1}} if outcome.conflict is not None else None

    def _send_left_rows(
        self, left_rows: NetRows, matches: Mapping[int, PartMatches]
    ) -> Iterator[pa.RecordBatch]:
        """Yield a message that says where the values of rows are that leave their keys (`find_sources`).

        `moved_rows` needs these values for the new keys.
        """
        if len(left_rows):
            yield make_message(0, LEFT_ROWS, pack(find_sources(self.batch_parts, left_rows, matches)))

    def _find_new_places(self, lost_places: Numbers) -> Numbers:
        """Return those of `lost_places` (places of moves without a row) that `batch_parts.lost_places` lacks."""
        return np.setdiff1d(lost_places, self.batch_parts.lost_places)

    def _make_counts(self, **counts: int) -> pa.RecordBatch:
        """Make the message with the counts of a part."""
        return self._make_report({"counts": counts})

    def _make_report(self, result: Mapping[str, object]) -> pa.RecordBatch:
        """Make a message with a part's result, which the last receiver passes on to the driver."""
        return make_message(self.batch_parts.writer_count - 1, ROWS, json.dumps(result).encode())


class KeyDecider(PartDecider):
    """Decides the changes of a part of the keys of a table with a key.

    Sends three kinds of messages to the receivers:
    - the places of the changes that have new rows, and where the values are that these changes did not send
    - for each file, the numbers of the rows to remove from it
    - the counts of inserted, updated, deleted and missing rows, and whether there is anything to commit

    If the changes cannot be applied, because of a conflict or of moves whose rows are missing, it sends only the reason.

    If the replica keeps deleted rows, messages like the first two kinds are also sent for these rows, as
    `ENDED_ROWS`, with the new metadata of the rows.
    """

    def _decide(self, received: ReceivedChanges) -> Iterator[pa.RecordBatch]:
        keyed_changes, matches, outcome = self._compute_outcome(received)
        if (refusal := self._find_refusal(keyed_changes, outcome)) is not None:
            yield self._make_report(refusal)
            return
        for kind, places, rows in self._describe_new_rows(keyed_changes, outcome, matches):
            yield from received.make_place_messages(kind, places, rows)
        if self.batch_parts.has_unsent_moves:
            left_rows = find_left_rows(keyed_changes.effective_changes, outcome.had_row)
            left_net_rows = describe_left_rows(keyed_changes.effective_places, left_rows)
            yield from self._send_left_rows(left_net_rows, matches)
        if not self.empties_replica:
            yield from self._describe_removed_rows(received, keyed_changes, outcome, matches)
        counts = outcome.net.count_rows(outcome.had_row)
        yield self._make_counts(**counts, changes=int(outcome.has_row_changes))

    def _describe_new_rows(
        self, keyed_changes: KeyedChanges, outcome: ChangesOutcome, matches: Mapping[int, PartMatches]
    ) -> Iterator[tuple[int, Numbers, pa.Table]]:
        """Yield what the writers of new rows need: the kind of message, the places of new rows, and a row for each place."""
        net_change = outcome.net
        new_rows = find_net_rows(
            keyed_changes.effective_places,
            net_change,
            outcome.has_row & (net_change.last_changes != NONE),
        )
        sources = find_sources(self.batch_parts, new_rows, matches)
        if self.batch_parts.has_feed:
            is_to_remove = outcome.mask_removed_keys(retain_ended=bool(self.batch_parts.soft_delete_columns))
            is_removed = is_to_remove & keyed_changes.mask_present_keys(
                m.key_numbers for m in matches.values()
            )
            is_update = is_removed[keyed_changes.find_new_keys(new_rows.places)]
            sources = sources.append_column(IS_UPDATE, pa.array(is_update))
        yield ROWS, new_rows.places, sources
        if self.batch_parts.soft_delete_columns:
            endings = RowEndings(keyed_changes, net_change, outcome.has_row, ())
            places, metadata = endings.find_ended_new_rows()
            yield ENDED_ROWS, places, metadata.append_column("place", pa.array(places))

    def _describe_removed_rows(
        self,
        received: ReceivedChanges,
        keyed_changes: KeyedChanges,
        outcome: ChangesOutcome,
        matches: Mapping[int, PartMatches],
    ) -> Iterator[pa.RecordBatch]:
        """Yield messages to the writers of files. The sender and the writer of a file's rows have the same number."""
        retain_ended = bool(self.batch_parts.soft_delete_columns)
        is_to_remove = outcome.mask_removed_keys(retain_ended=retain_ended)
        endings = RowEndings(keyed_changes, outcome.net, outcome.has_row, ())
        metadata_by_key = endings.find_metadata_rows() if retain_ended else None
        has_row = outcome.mask_keys_with_row()
        for number, match in matches.items():
            is_removed = is_to_remove[match.key_numbers]
            row_numbers, keys = match.row_numbers[is_removed], match.key_numbers[is_removed]
            if self.batch_parts.ends_all_rows:
                other_rows = received.find_other_living_rows(number, match)
                row_numbers = np.concatenate([row_numbers, other_rows])
                keys = np.concatenate([keys, np.full(len(other_rows), endings.truncated_key)])
            if not len(row_numbers):
                continue
            rows = pa.table({"row": row_numbers})
            if self.batch_parts.has_feed:
                rows = rows.append_column(IS_UPDATE, pa.array(has_row[keys] | retain_ended))
            yield make_message(number, ROWS, pack(rows))
            if metadata_by_key is not None:
                metadata_rows = metadata_by_key[keys]
                is_ended = metadata_rows != NONE
                metadata = endings.metadata.take(pa.array(metadata_rows[is_ended]))
                ended_rows = metadata.append_column("row", pa.array(row_numbers[is_ended]))
                yield make_message(number, ENDED_ROWS, pack(ended_rows))


class KeyExaminer(PartDecider):
    """Examines the changes of a part of the keys: says whether a `KeyDecider` could apply them, and sends no messages."""

    def _decide(self, received: ReceivedChanges) -> Iterator[pa.RecordBatch]:
        keyed_changes, _, outcome = self._compute_outcome(received)
        if (refusal := self._find_refusal(keyed_changes, outcome)) is not None:
            yield make_result(refusal)


class MultisetDecider(PartDecider):
    """Decides the changes of a part of the digests of a table without a key. Two equal rows have the same digest.

    Sends the places of the changes that have new rows, for each file the numbers of the rows to remove from it, and the
    counts of inserted, deleted and missing rows. If moves do not find their rows, it sends only the places of these moves.
    """

    def _decide(self, received: ReceivedChanges) -> Iterator[pa.RecordBatch]:
        changes = KeylessChanges(received.join())
        digests = changes.keyed_changes.keys
        matches = {} if self.empties_replica else received.find_matches(digests)
        counts = sum(
            (np.bincount(match.key_numbers, minlength=digests.num_rows) for match in matches.values()),
            np.zeros(digests.num_rows, np.int64),
        )
        effective_changes = changes.keyed_changes.effective_changes
        net_change = compute_multiset_change(effective_changes, counts)
        moves = net_change.changes_without_row
        moves = moves[effective_changes.operations[moves] == LEAVE]
        if len(lost_places := self._find_new_places(changes.places[moves])):
            yield self._make_report(describe_lost_places(lost_places))
            return
        places = changes.places[net_change.inserting_changes]
        yield from received.make_place_messages(
            ROWS, places, self._add_no_updates(pa.table({"place": places}))
        )
        remaining_counts = net_change.deletion_counts.copy()
        for number, match in sorted(matches.items()):
            # A shuffle may bring the messages of one file in another order.
            order = np.argsort(match.row_numbers)
            is_removed = mask_first_occurrences(match.key_numbers[order], remaining_counts)
            if is_removed.any():
                row_numbers = match.row_numbers[order][is_removed]
                rows = self._add_no_updates(pa.table({"row": row_numbers}))
                yield make_message(number, ROWS, pack(rows))
        inserted, deleted = len(places), int(net_change.deletion_counts.sum())
        yield self._make_counts(
            inserted=inserted,
            deleted=deleted,
            missing=net_change.missing_count,
            changes=inserted + deleted,
        )

    def _add_no_updates(self, rows: pa.Table) -> pa.Table:
        """Add the column `IS_UPDATE`, if the replica has a change data feed: without a key, no row is updated."""
        if not self.batch_parts.has_feed:
            return rows
        return rows.append_column(IS_UPDATE, pa.array(np.zeros(rows.num_rows, np.bool_)))


def describe_lost_places(places: Numbers) -> Mapping[str, object]:
    """Return the result of a part in which the moves at these places find no row.

    Very many places would need much memory in the driver. Then the result only says that the changes cannot be applied.
    """
    return {"counts": {"refused": 1}} if len(places) > _MAX_LOST_PLACES else {"lost_places": places.tolist()}


def find_sources(batch_parts: BatchParts, rows: NetRows, matches: Mapping[int, PartMatches]) -> pa.Table:
    """Return the places of the changes that have new rows.

    If some changes lack values, also return where these values are: in other changes, or in a row of a file. If they are
    in the row that a move took from another key, `link` has the place of this move.
    """
    columns = {"place": rows.places}
    if not batch_parts.unsent_columns:
        return pa.table(columns)
    for number, name in enumerate(batch_parts.unsent_columns):
        columns[f"sent{number}"] = rows.sent_places[name]
    if batch_parts.has_unsent_moves:
        columns["link"] = np.where(rows.is_unsent, rows.begin_places, NONE)
    files, base_rows = np.full(len(rows), NONE), np.full(len(rows), NONE)
    for sender, match in matches.items():
        greatest_key = int(max(match.key_numbers.max(initial=NONE), rows.base_keys.max(initial=NONE)))
        row_by_key = np.full(greatest_key + 2, NONE)
        row_by_key[match.key_numbers] = match.row_numbers
        base_rows_in_file = row_by_key[rows.base_keys]
        file_index = sender - batch_parts.change_part_count
        files = np.where(base_rows_in_file == NONE, files, file_index)
        base_rows = np.maximum(base_rows, base_rows_in_file)
    return pa.table({**columns, "file": files, "row": base_rows})


def make_result(result: Mapping[str, object]) -> pa.RecordBatch:
    """Make a row of `RESULT_SCHEMA` that has a result and describes no file."""
    return pa.RecordBatch.from_pylist([{"result": json.dumps(result)}], RESULT_SCHEMA)
