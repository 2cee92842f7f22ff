"""Plans and commits the files of a table whose changes tasks apply by parts of its keys.

In: the files of the table, and the results of the tasks that write (`part_writer`, `version_part_tasks`). Out: a plan,
which says which files the tasks search, and one commit with the files that they wrote. Raises LakeError, and
OvertakenError if another process has committed to the table first.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.key_filter_tasks import SLOT_RANGE_SCHEMA, KeyFilterBuilder, SlotReader
from pgsieve.assets.steps.apply.key_reader import KeyReader, ReplicaFile
from pgsieve.assets.steps.apply.moved_rows import DeciderWithLinks, SourceResolver
from pgsieve.assets.steps.apply.part_deciders import RESULT_SCHEMA, PartDecider
from pgsieve.assets.steps.apply.part_writer import PartWriter
from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.key_filters import KeyFilter, KeySlots
from pgsieve.decoding.changes.keys import is_orderable
from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile, parse_vector_file
from pgsieve.resources.lake.delta.key_lookup import Bounds, StoredFile
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.row_deletion import RowDeletion
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import RowGroup, Store
from pgsieve.resources.parts import Receivers

#: A part has about this many changes. Larger arrays would not stay in a core's cache, and each would need new memory.
_PART_CHANGES = 125_000
#: If the files have more rows per change, the changes are read once more for a filter, and only rows that it passes are
#: divided by keys.
_MAX_ROWS_PER_CHANGE = 4

#: A move is an UPDATE of the key; it is lost if it finds no row. If the parts still find lost moves after so many rounds, the
#: driver decides the changes.
_MAX_ROUNDS = 8
#: How many moves, one after the other, are followed to find a value that none of them sent: first a few, and more if it is
#: necessary. If the last number is too small, the driver decides the changes.
_FOLLOWED_MOVES = (2, 12)


def count_key_parts(change_count: int, parallelism: int) -> int:
    """Return the number of parts into which the keys of a batch are divided."""
    return max(parallelism, -(-change_count // _PART_CHANGES))


@dataclass(frozen=True)
class TaskResults:
    """What the tasks that write have returned.

    - `counts`: the sums of the counts of all tasks
    - `lost_places`: the places of lost moves that the tasks did not know before
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
    make_tasks: Callable[[KeyReader], tuple[PartDecider, PartWriter | None]],
) -> TaskResults | None:
    """Let tasks read the keys, decide the changes of each part, and write files; None if this takes too many rounds.

    `make_tasks` makes the tasks that decide the changes, and those that write; without the latter, nothing is written.

    The two keys of a move, an UPDATE that changes the key, may be in different parts. So in the first round the parts
    assume that each move finds its row. If some do not (lost moves), the next round leaves out the rows that they would
    have brought to their new keys. Then it may turn out that later moves find no row either. The last round is the first
    one that finds no more of them:

        the replica has no row 1       round 1              round 2              round 3
        UPDATE moves row 1 to 2        lost                 known                known
        UPDATE moves row 2 to 3        finds row 2          lost                 known
        DELETE of row 3                finds row 3          finds row 3          finds none
    """
    lost_places, (followed_moves, most_followed_moves) = np.empty(0, np.int64), _FOLLOWED_MOVES
    for _ in range(_MAX_ROUNDS):
        reader = replace(reader, batch_parts=replace(reader.batch_parts, lost_places=lost_places))
        receivers = _make_receivers(reader, *make_tasks(reader), followed_moves)
        results = TaskResults.from_rows(runner.exchange(reader, reader.task_count, receivers, RESULT_SCHEMA))
        if len(results.lost_places):
            lost_places = np.union1d(lost_places, results.lost_places)
        elif results.counts["refused"] or not results.counts["unresolved"]:
            return results
        elif followed_moves == most_followed_moves:
            break
        else:
            followed_moves = most_followed_moves
    return None


def add_key_filter(runner: Runner, reader: KeyReader, plan: "FilesPlan", change_count: int) -> KeyReader:
    """Let the reader send only rows that a filter passes, if the files of the plan have many rows for each change.

    If there is a TRUNCATE, it ends all rows, and all are sent.
    """
    has_truncate = reader.batch_parts.extent.truncated_at is not None
    if plan.row_count <= _MAX_ROWS_PER_CHANGE * change_count or has_truncate:
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
    reader: KeyReader, decider: PartDecider, writer: PartWriter | None, followed_moves: int
) -> Sequence[Receivers]:
    """Make the receivers of all rounds; values that moves did not send are sought over so many moves."""
    batch_parts, count = reader.batch_parts, reader.key_part_count
    if writer is None:
        return [Receivers(count, decider)]
    writers = Receivers(batch_parts.writer_count, writer)
    if not batch_parts.has_unsent_moves:
        return [Receivers(count, decider), writers]
    resolvers = (
        SourceResolver(batch_parts, count, is_last=step == followed_moves)
        for step in range(1, followed_moves + 1)
    )
    return [
        Receivers(count, DeciderWithLinks(decider, count)),
        *(Receivers(count, resolver) for resolver in resolvers),
        writers,
    ]


@dataclass(frozen=True)
class FilesPlan:
    """The files of a table that may have keys of the batch.

    If rows are marked in deletion vectors, `add_action_by_name` maps the name of each file to its `add` action in the
    Delta log. It is None if the files are rewritten instead. `row_count` is the number of rows in all files.
    """

    files: Sequence[ReplicaFile]
    row_count: int
    add_action_by_name: Mapping[str, Action] | None = None

    @classmethod
    def make(
        cls, deletion: RowDeletion, files: Sequence[StoredFile], version: int, *, removes_rows: bool
    ) -> "FilesPlan | None":
        """Decide how to remove rows from these files of a table, which has this Delta version.

        `removes_rows` says whether the batch may remove rows. None if the files can neither be rewritten nor get deletion
        vectors.
        """
        committer, path = deletion.committer, deletion.path
        row_count = sum(file.row_count or 0 for file in files)
        is_cheap_to_rewrite = (
            not removes_rows or sum(file.size_bytes for file in files) <= deletion.max_rewritten_bytes
        )
        if not files or (is_cheap_to_rewrite and committer.can_rewrite_files(path, deletion.columns)):
            return cls([ReplicaFile(file.name, file.log_path, file.size_bytes) for file in files], row_count)
        # Deletion vectors have to be enabled by a property of the table. INSERTs alone must not enable them.
        if not deletion.can_mark_rows or not (removes_rows or committer.delta_rs.has_deletion_vectors(path)):
            return None
        add_action_by_name = committer.find_markable_files(path, {file.name for file in files}, version)
        if add_action_by_name is None:
            return None
        vectors = [add_action_by_name[file.name].get("deletionVector") for file in files]
        if any(vector and parse_vector_file(vector) is None for vector in vectors):
            return None
        return cls(
            [ReplicaFile(f.name, f.log_path, f.size_bytes, v) for f, v in zip(files, vectors, strict=True)],
            row_count,
            add_action_by_name,
        )

    @property
    def marks_rows(self) -> bool:
        """Whether removed rows are marked in deletion vectors. Otherwise their files are rewritten."""
        return self.add_action_by_name is not None

    def commit(
        self, committer: FileCommitter, path: str, schema: pa.Schema, results: TaskResults, commit: Commit
    ) -> None:
        """Commit what the tasks have written to the table at `path`, whose new rows have the columns of `schema`."""
        changed_files = [(self.files[index], vector) for index, vector in results.changed_files]
        if self.add_action_by_name is not None and changed_files:
            assert commit.expected_version is not None
            committer.commit_marked_files(
                lambda: results.new_files,
                path,
                [
                    MarkedFile(self.add_action_by_name[file.name], None, vector)
                    for file, vector in changed_files
                ],
                commit.position,
                commit.expected_version,
            )
            return
        bytes_by_removed_path = {file.log_path: file.size_bytes for file, _ in changed_files}
        committer.commit(lambda: results.new_files, path, schema, commit, bytes_by_removed_path)


def list_key_bounds(
    store: Store, groups: Sequence[RowGroup], key_schema: pa.Schema
) -> list[Mapping[str, Bounds]]:
    """For each file of the change history that has these row groups, list the bounds of its keys.

    `key_schema` has the names and types of the key's columns. Files without keys are left out.
    """
    bounds = [_read_bounds(store, file, key_schema) for file in dict.fromkeys(group.file for group in groups)]
    return [file_bounds for file_bounds in bounds if file_bounds is not None]


def _read_bounds(store: Store, file: str, key_schema: pa.Schema) -> dict[str, Bounds] | None:
    """Map each key column to its lowest and highest value in a file of the change history; None if it has no keys."""
    # Statistics are found by a path such as `new.id`. If a column's name has a dot, its path may be that of another one.
    type_by_column = {
        key.name: key.type for key in key_schema if "." not in key.name and is_orderable(key.type)
    }
    stored_bounds = store.read_row_group_bounds(
        file,
        {f"{side}.{name}": column_type for side in SIDES for name, column_type in type_by_column.items()},
    )
    bounds = dict[str, Bounds]()
    for name, column_type in type_by_column.items():
        all_bounds = [bound for side in SIDES for bound in stored_bounds.get(f"{side}.{name}", [None])]
        if not all_bounds:
            return None
        known_bounds = [bound for bound in all_bounds if bound is not None]
        if len(known_bounds) == len(all_bounds):
            extremes = pc.min_max(pa.array([value for bound in known_bounds for value in bound], column_type))
            bounds[name] = extremes["min"], extremes["max"]
    return bounds
