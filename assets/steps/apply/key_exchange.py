"""Runs the rounds of tasks that apply very many changes divided by their keys.

In: the task that reads the keys (`key_reader`), those that find out which rows of a part of the keys are removed and written
(`part_deciders`), and those that write files. Out: what the last tasks return: counts, and the new and the changed files.
Raises LakeError.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.key_filter_tasks import SLOT_RANGE_SCHEMA, KeyFilterBuilder, SlotReader
from pgsieve.assets.steps.apply.key_reader import KeyReader
from pgsieve.assets.steps.apply.moved_rows import DeciderWithLinks, SourceResolver
from pgsieve.assets.steps.apply.part_deciders import RESULT_SCHEMA, PartDecider
from pgsieve.assets.steps.apply.part_writer import PartWriter
from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.decoding.changes.key_filters import KeyFilter, KeySlots
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.parts import Receivers

#: If the files have more rows per change than this, a filter for the changed keys is made first, for which the changes are
#: read once more. Only rows that pass it are divided by keys.
_MAX_ROWS_PER_CHANGE = 4

#: A move is an UPDATE of the key; it is lost if it finds no row. If the parts still find lost moves after so many rounds, the
#: driver decides the changes.
_MAX_ROUNDS = 8
#: Resolvers are tasks that find the values that moves did not send (`moved_rows`). This is the number of their rounds: first
#: a few, then more if necessary. In n rounds they find a value that 2**n - 1 successive moves of a row did not send. If a row
#: moves even more often, the driver decides the changes.
_RESOLVER_ROUNDS = (2, 12)


@dataclass(frozen=True)
class TaskResults:
    """What the tasks that write have returned.

    - `counts`: the sums of the counts of all tasks
    - `lost_places`: the lost moves that the tasks did not know before, by the numbers that order the changes (places)
    - `new_files`: a row (`FILE_SCHEMA`) for each new file
    - `changed_files`: the indices of the files that lose rows, each with its new deletion vector, or None if the file is
      rewritten
    """

    counts: Counter[str]
    lost_places: Numbers
    new_files: pa.Table
    changed_files: Sequence[tuple[int, Action | None]]

    @classmethod
    def from_rows(cls, rows: pa.Table) -> "TaskResults":
        """Divide the rows that the tasks returned."""
        results = [json.loads(text) for text in rows["result"].to_pylist() if text is not None]
        return cls(
            sum((Counter(result["counts"]) for result in results if "counts" in result), Counter[str]()),
            np.array([place for result in results for place in result.get("lost_places", ())], np.int64),
            rows.filter(pc.is_valid(rows["path"])).select(FILE_SCHEMA.names),
            [(result["file"], result.get("vector")) for result in results if "file" in result],
        )


def exchange_keys(
    runner: Runner,
    reader: KeyReader,
    row_count: int,
    make_tasks: Callable[[KeyReader], tuple[PartDecider, PartWriter | None]],
) -> TaskResults | None:
    """Let tasks read the keys, decide the changes of each part, and write files; None if this takes too many rounds.

    `row_count` is the number of rows in the files that the reader reads. `make_tasks` makes the tasks that decide the
    changes, and those that write; without the latter, nothing is written.

    The two keys of a move, an UPDATE that changes the key, may be in different parts. So in the first round the parts
    assume that each move finds its row. If some do not (lost moves), the next round leaves out the rows that they would
    have brought to their new keys. Then it may turn out that later moves find no row either. The last round is the first
    one that finds no more of them:

        the replica has no row 1       round 1              round 2              round 3
        UPDATE moves row 1 to 2        lost                 known                known
        UPDATE moves row 2 to 3        finds row 2          lost                 known
        DELETE of row 3                finds row 3          finds row 3          finds none
    """
    lost_places, (resolver_rounds, most_resolver_rounds) = np.empty(0, np.int64), _RESOLVER_ROUNDS
    reader = _add_key_filter(runner, reader, row_count)
    for _ in range(_MAX_ROUNDS):
        reader = replace(reader, batch_parts=replace(reader.batch_parts, lost_places=lost_places))
        receivers = _make_receivers(reader, *make_tasks(reader), resolver_rounds)
        results = TaskResults.from_rows(runner.exchange(reader, reader.task_count, receivers, RESULT_SCHEMA))
        if len(results.lost_places):
            lost_places = np.union1d(lost_places, results.lost_places)
        elif results.counts["refused"] or not results.counts["unresolved"]:
            return results
        elif resolver_rounds == most_resolver_rounds:
            break
        else:
            resolver_rounds = most_resolver_rounds
    return None


def _add_key_filter(runner: Runner, reader: KeyReader, row_count: int) -> KeyReader:
    """Let the reader send only rows that a filter passes, if the files have many rows for each change.

    A TRUNCATE also ends rows whose keys have no change, so with a TRUNCATE all rows are sent.
    """
    change_count, has_truncate = (
        reader.division.change_count,
        reader.batch_parts.extent.truncated_at is not None,
    )
    if row_count <= _MAX_ROWS_PER_CHANGE * change_count or has_truncate:
        return reader
    # A move has two keys.
    slots = KeySlots.make(
        2 * change_count if reader.batch_parts.has_moves else change_count, runner.parallelism
    )
    receivers = Receivers(slots.range_count, KeyFilterBuilder(slots))
    ranges = runner.exchange(
        SlotReader(reader, slots), len(reader.change_parts), [receivers], SLOT_RANGE_SCHEMA
    )
    bits = np.zeros((slots.range_count, slots.range_length // 8), np.uint8)
    for number, range_bits in zip(ranges["range"].to_pylist(), ranges["bits"].to_pylist(), strict=True):
        bits[number] = np.frombuffer(range_bits, np.uint8)
    return replace(reader, key_filter=KeyFilter(slots, bits.reshape(-1)))


def _make_receivers(
    reader: KeyReader, decider: PartDecider, writer: PartWriter | None, resolver_rounds: int
) -> Sequence[Receivers]:
    """Make the receivers of all rounds. Values that moves did not send take `resolver_rounds` rounds."""
    batch_parts, count = reader.batch_parts, reader.division.key_part_count
    if writer is None:
        return [Receivers(count, decider)]
    writers = Receivers(batch_parts.writer_count, writer)
    if not batch_parts.has_unsent_moves:
        return [Receivers(count, decider), writers]
    resolvers = (
        SourceResolver(batch_parts, count, is_last=number == resolver_rounds)
        for number in range(1, resolver_rounds + 1)
    )
    return [
        Receivers(count, DeciderWithLinks(decider, count)),
        *(Receivers(count, resolver) for resolver in resolvers),
        writers,
    ]
