"""Runs the tasks that apply very many changes to a table, divided by the table's keys.

The tasks have stages. Those of each stage send messages to those of the next one:

    KeyReader reads keys ──► PartDecider decides the changes of one part of the keys ──► PartWriter writes files

To decide changes is to find out which rows are removed and written. In: these tasks. Out: what the last ones return: counts,
and the new and the changed files. Raises LakeError, and UnsuitedWayError if the tasks cannot decide.
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
from pgsieve.assets.steps.apply.ways import UnsuitedWayError
from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.decoding.changes.key_filters import KeyFilter, KeySlots
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.parts import Receivers

#: If the files have more rows per change than this, only rows that pass a filter are sent to deciders. To make the filter,
#: tasks read the changes once more.
_MAX_ROWS_PER_CHANGE = 4

#: A move is an UPDATE that changes the key. It is lost if it finds no row. Each attempt may find more lost moves. After this
#: number of attempts the driver decides the changes.
_MAX_ATTEMPTS = 8
#: An UPDATE does not send a TOASTed value that it leaves unchanged. If it is a move, the value is with the row's former key.
#: `SourceResolver` finds it, in stages between the deciders and the writers. n stages find a value that 2**n - 1 successive
#: moves did not send. The first number of stages here mostly suffices. If not, another attempt has the second number. If a
#: row moves even more often, the driver decides the changes.
_RESOLVER_STAGES = (2, 12)


@dataclass(frozen=True)
class TaskResults:
    """What the tasks of the last stage have returned.

    - `counts`: the sums of the counts of all tasks
    - `lost_places`: the places of the lost moves that no earlier attempt has found. A place is a number that orders changes.
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
) -> TaskResults:
    """Let tasks read the keys, decide the changes of each part, and write files.

    Raises UnsuitedWayError if a task refuses its part, or if this takes too many attempts.

    `row_count` is the number of rows in the files that the reader reads. `make_tasks` makes the tasks of the other stages.
    If it makes no writer, the changes are decided, and nothing is written.

    The two keys of a move may be in different parts, which are decided at the same time. So the first attempt assumes that
    each move finds its row. If a move is lost, the next attempt knows that it brings no row to its new key. Then a later move
    of this row may turn out to be lost, too. The last attempt is the one that finds no more of them:

        the replica has no row 1       attempt 1            attempt 2            attempt 3
        UPDATE moves row 1 to 2        lost                 known                known
        UPDATE moves row 2 to 3        finds row 2          lost                 known
        DELETE of row 3                finds row 3          finds row 3          finds none
    """
    lost_places, (resolver_stages, most_resolver_stages) = np.empty(0, np.int64), _RESOLVER_STAGES
    reader = _add_key_filter(runner, reader, row_count)
    for _ in range(_MAX_ATTEMPTS):
        reader = replace(reader, batch_parts=replace(reader.batch_parts, lost_places=lost_places))
        stages = _list_stages(reader, *make_tasks(reader), resolver_stages)
        results = TaskResults.from_rows(runner.exchange(reader, reader.task_count, stages, RESULT_SCHEMA))
        if len(results.lost_places):
            lost_places = np.union1d(lost_places, results.lost_places)
        elif results.counts["refused"]:
            raise UnsuitedWayError("a part of the keys has a conflict, or too many lost moves")
        elif not results.counts["unresolved"]:
            return results
        elif resolver_stages == most_resolver_stages:
            break
        else:
            resolver_stages = most_resolver_stages
    raise UnsuitedWayError("UPDATEs that change the key depend on each other too often")


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
    # A move has two keys, any other change has one.
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


def _list_stages(
    reader: KeyReader, decider: PartDecider, writer: PartWriter | None, resolver_stages: int
) -> Sequence[Receivers]:
    """List the stages after the reader. A receiver is a task that gets messages; a stage has a number of them."""
    batch_parts, part_count = reader.batch_parts, reader.division.key_part_count
    if writer is None:
        return [Receivers(part_count, decider)]
    writers = Receivers(batch_parts.writer_count, writer)
    if not batch_parts.has_unsent_moves:
        return [Receivers(part_count, decider), writers]
    resolvers = (
        SourceResolver(batch_parts, part_count, is_last=number == resolver_stages)
        for number in range(1, resolver_stages + 1)
    )
    return [
        Receivers(part_count, DeciderWithLinks(decider, part_count)),
        *(Receivers(part_count, resolver) for resolver in resolvers),
        writers,
    ]
