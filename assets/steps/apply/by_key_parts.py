"""Applies very many changes to one replica table. The keys are divided into parts, and a task decides each part.

A task decides a part: it computes from the changes of these keys which rows come and go.

In: a batch's changes in the files of the change history. Out: `TableResult`, after one commit; None if the table or the
changes cannot be divided by keys. In that case `by_files` applies them, with all keys in the memory of this process.
Raises LakeError.

Tasks read the changes, decide which rows come and go, and write the files. This process only commits: it receives the
names of files and numbers of rows, but no rows and no keys.

    row groups of changes ─┐ keys                         ┌─ places ──► new files
                           ├───────► the net change of ───┤
    files of the replica ──┘         a part of the keys   └─ rows ────► files without them, or deletion vectors
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.by_files import FilesTask, ManyChanges
from pgsieve.assets.steps.apply.keyed_changes import UnorderedChanges, extract_changes, join_changes
from pgsieve.assets.steps.apply.row_selection import RowSelection, is_in
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, make_batch_result
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent
from pgsieve.decoding.changes.keys import SoughtKeys, assign_key_parts, is_orderable
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.net_change import NONE, Numbers
from pgsieve.resources.lake.delta.deletion_vectors import (
    MarkedFile,
    parse_vector_file,
    read_vector,
    write_vector,
)
from pgsieve.resources.lake.delta.key_lookup import Bounds, FileMatches, find_stored_files
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_deletion import RowDeletion
from pgsieve.resources.lake.stores.store import RowGroup, Store, divide_groups, join_path
from pgsieve.resources.parts import Guard, Message, Receivers, make_message

#: A part has about this many changes. Larger arrays would not stay in a core's cache, and each would need new memory.
_PART_CHANGES = 125_000
#: If the replica's files have more rows per change, `by_files` applies the batch. It looks the keys up in each file, and
#: this takes less time per row than to divide the rows by keys.
_MAX_ROWS_PER_CHANGE = 16

#: The columns that tasks return: a row per new file, or a row with only `result`, a JSON text (counts, changed files).
_RESULT_SCHEMA = FILE_SCHEMA.append(pa.field("result", pa.string()))
_NO_ROWS = np.empty(0, np.int64)
#: Stands in a message for the sender's number, and says that the message has TRUNCATEs.
_TRUNCATES_SENDER = -1
_TRUNCATE_SCHEMA = pa.schema([("commit_lsn", pa.int64()), ("ordinal", pa.int64())])


@dataclass(frozen=True)
class ReplicaFile:
    """A file of the replica: its name in the table's folder, its path in the log, its bytes, and its deletion vector."""

    name: str
    log_path: str
    size_bytes: int
    deletion_vector: Action | None = None


@dataclass(frozen=True)
class KeyPartsWriter:
    """Applies a batch to one replica table at `path` by parts of its keys; `changes_path` is its change history."""

    lake: Lake
    path: str
    changes_path: str
    definition: Definition
    pending: PendingChanges
    end: int

    def apply(self, stored_changes: ManyChanges) -> TableResult | None:
        """Apply the changes; None if there is a key conflict, or if the batch cannot be divided by keys."""
        if not self._is_divisible:
            return None
        with self.lake.access.translate_errors(self.path):
            return self._write(stored_changes)

    @property
    def _is_divisible(self) -> bool:
        """Whether the batch is large enough, and each key can be decided from its own changes alone.

        Two kinds of batches cannot be divided. An UPDATE that moves a row to another key concerns two keys, which may
        be in different parts. A TOAST value that a change did not send has to be read from another change or from the
        replica.
        """
        pending, definition = self.pending, self.definition
        return (
            _count_changes(pending) >= self.lake.policy.min_parted_changes
            and bool(definition.key)
            and not definition.soft_delete_columns
            and not (pending.unsent_columns or pending.key_change_count)
        )

    def _plan(self, stored_changes: ManyChanges, key_schema: pa.Schema) -> "_FilesPlan | None":
        """Find the replica's files that may have one of the keys, and decide how to remove rows from them.

        None if the files have too many rows, or if they can neither be rewritten nor get deletion vectors.
        """
        path, pending, columns, committer = (
            self.path,
            self.pending,
            self.definition.names,
            stored_changes.committer,
        )
        with self.lake.access.translate_errors(self.changes_path):
            change_files = dict.fromkeys(group.file for group in stored_changes.groups)
            bounds = [_read_bounds(committer.delta_rs.store, file, key_schema) for file in change_files]
        table, max_rows = committer.delta_rs.open_table(path), _MAX_ROWS_PER_CHANGE * _count_changes(pending)
        files = find_stored_files(table, [file_bounds for file_bounds in bounds if file_bounds is not None])
        if sum(file.row_count or 0 for file in files) > max_rows:
            return None
        deletion = RowDeletion(self.lake, committer, path, columns, pending.size_bytes)
        removes_rows = not stored_changes.empties_replica and pending.count("update", "delete") > 0
        is_cheap_to_rewrite = (
            not removes_rows or sum(file.size_bytes for file in files) <= deletion.max_rewritten_bytes
        )
        if not files or (is_cheap_to_rewrite and committer.can_rewrite_files(path, columns)):
            return _FilesPlan([ReplicaFile(file.name, file.log_path, file.size_bytes) for file in files])
        # Deletion vectors have to be enabled by a property of the table. INSERTs alone must not enable them.
        if not deletion.can_mark_rows or not (removes_rows or committer.delta_rs.has_deletion_vectors(path)):
            return None
        add_action_by_name = committer.find_markable_files(
            path, {file.name for file in files}, pending.head.version
        )
        vectors = (
            []
            if add_action_by_name is None
            else [add_action_by_name[file.name].get("deletionVector") for file in files]
        )
        if add_action_by_name is None or any(
            vector and parse_vector_file(vector) is None for vector in vectors
        ):
            return None
        return _FilesPlan(
            [ReplicaFile(f.name, f.log_path, f.size_bytes, v) for f, v in zip(files, vectors, strict=True)],
            add_action_by_name,
        )

    def _write(self, stored_changes: ManyChanges) -> TableResult | None:
        """Let tasks decide the changes and write files, and commit the files; None if there is a conflict."""
        path, pending, committer, schema = (
            self.path,
            self.pending,
            stored_changes.committer,
            stored_changes.schema,
        )
        key_schema = pa.schema([schema.field(name) for name in self.definition.key])
        plan = self._plan(stored_changes, key_schema)
        if plan is None:
            return None
        runner, store, files = self.lake.policy.choose_runner(pending.size_bytes), self.lake.store, plan.files
        change_parts = divide_groups(stored_changes.groups, runner.parallelism)
        key_part_count = max(runner.parallelism, -(-_count_changes(pending) // _PART_CHANGES))
        file_part_count = min(len(files), 2 * runner.parallelism)
        batch_parts = _BatchParts(key_schema, pending.extent, len(change_parts), len(files))
        selection = RowSelection(pending.extent, Stamp(stored_changes.stamp_column))
        replica_schema, target_file_bytes = (
            committer.delta_rs.arrow_schema(path),
            committer.find_target_file_bytes(path, {}),
        )
        files_task = FilesTask(store, path, schema, replica_schema, target_file_bytes, (), (), (), selection)
        rows = runner.exchange(
            _Reader(batch_parts, store, path, change_parts, files, file_part_count, key_part_count),
            len(change_parts) + file_part_count,
            [
                Receivers(key_part_count, _Decider(batch_parts, stored_changes.empties_replica)),
                Receivers(
                    batch_parts.writer_count,
                    _Writer(
                        batch_parts, files_task, change_parts, files, plan.add_action_by_name is not None
                    ),
                ),
            ],
            _RESULT_SCHEMA,
        )
        return self._commit(stored_changes, plan, rows)

    def _commit(self, stored_changes: ManyChanges, plan: "_FilesPlan", rows: pa.Table) -> TableResult | None:
        path, pending, base_version = self.path, self.pending, self.pending.head.version
        results = [json.loads(text) for text in rows["result"].to_pylist() if text is not None]
        counts = sum((Counter(result["counts"]) for result in results if "counts" in result), Counter[str]())
        if counts["conflicts"]:
            return None
        new_files = rows.filter(pc.is_valid(rows["path"])).select(FILE_SCHEMA.names)
        changed_files = [
            (plan.files[result["file"]], result.get("vector")) for result in results if "file" in result
        ]
        if plan.add_action_by_name is not None and changed_files:
            marked_files = [
                MarkedFile(plan.add_action_by_name[file.name], None, vector) for file, vector in changed_files
            ]
            stored_changes.committer.commit_marked_files(
                lambda: new_files, path, marked_files, self.end, base_version
            )
        elif counts["changes"] or pending.truncated_at is not None:
            bytes_by_removed_path = {file.log_path: file.size_bytes for file, _ in changed_files}
            commit = Commit(self.end, overwrite=stored_changes.empties_replica, expected_version=base_version)
            stored_changes.committer.commit(
                lambda: new_files, path, stored_changes.schema, commit, bytes_by_removed_path
            )
        return make_batch_result(self.lake, path, pending, self.end, **pending.adjust_row_counts(counts))


@dataclass(frozen=True)
class _FilesPlan:
    """The replica's files that may have keys of the batch.

    If rows are marked in deletion vectors, `add_action_by_name` maps the name of each file to its `add` action in the
    Delta log. It is None if the files are rewritten instead.
    """

    files: Sequence[ReplicaFile]
    add_action_by_name: Mapping[str, Action] | None = None


def _count_changes(pending: PendingChanges) -> int:
    return pending.count("insert", "update", "delete")


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


@dataclass(frozen=True)
class _BatchParts:
    """What all tasks of a batch know: the key's columns, which changes the batch has, and the numbers of parts.

    `change_part_count` is the number of parts of the changes, `file_count` the number of files of the replica. The
    receivers that write are numbered in this order: one per part of the changes, which writes the new rows of the part;
    one per file of the replica; and one that sums up the counts.
    """

    key_schema: pa.Schema
    extent: Extent
    change_part_count: int
    file_count: int

    @property
    def writer_count(self) -> int:
        """The number of receivers that write."""
        return self.change_part_count + self.file_count + 1


@dataclass(frozen=True)
class _Reader:
    """Reads the keys of the changes and of the replica's files, and sends each key to the `_Decider` of its part.

    `file_task_count` is the number of tasks that read files of the replica. `key_part_count` is the number of parts of
    the keys.
    """

    batch_parts: _BatchParts
    store: Store
    path: str
    change_parts: Sequence[Sequence[RowGroup]]
    files: Sequence[ReplicaFile]
    file_task_count: int
    key_part_count: int

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Send the changes of a part, or the rows of some files."""
        if number < len(self.change_parts):
            yield from guard(self._send_changes(number))
        else:
            for file_index in range(number - len(self.change_parts), len(self.files), self.file_task_count):
                yield from guard(self._send_rows(file_index))

    def _send_changes(self, number: int) -> Iterator[pa.RecordBatch]:
        batch_parts = self.batch_parts
        names = [
            *PLACE_COLUMNS,
            *(f"{side}.{name}" for side in SIDES for name in batch_parts.key_schema.names),
        ]
        for _, read in self.store.iterate_group_readers(self.change_parts[number]):
            changes = extract_changes(read(names), batch_parts.key_schema, (), batch_parts.extent)
            if changes.truncates.num_rows:
                for part in range(self.key_part_count):
                    yield make_message(part, _TRUNCATES_SENDER, _pack(changes.truncates))
            rows = _label_keys(changes.keys).append_column("place", pa.array(changes.places))
            rows = rows.append_column("operation", pa.array(changes.operations))
            if batch_parts.extent.truncated_at is not None:
                rows = rows.append_column("lsn", pa.array(changes.commit_lsns))
                rows = rows.append_column("ordinal", pa.array(changes.ordinals))
            yield from self._make_messages(number, changes.keys, rows)

    def _send_rows(self, file_index: int) -> Iterator[pa.RecordBatch]:
        file, begin = self.files[file_index], 0
        deleted_numbers = read_vector(self.store, self.path, file.deletion_vector)
        for batch in self.store.read_batches(join_path(self.path, file.name), self.batch_parts.key_schema):
            row_numbers = np.arange(begin, begin + batch.num_rows)
            keys, begin = pa.Table.from_batches([batch]), begin + batch.num_rows
            if (is_deleted := is_in(row_numbers, deleted_numbers)).any():
                keys, row_numbers = keys.filter(pa.array(~is_deleted)), row_numbers[~is_deleted]
            labelled_rows = _label_keys(keys).append_column("row", pa.array(row_numbers))
            yield from self._make_messages(len(self.change_parts) + file_index, keys, labelled_rows)

    def _make_messages(self, sender: int, keys: pa.Table, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield a message for each part of the keys, which has the rows of this part."""
        # NumPy sorts numbers of two bytes without comparing them.
        parts_of_rows = assign_key_parts(keys, self.key_part_count).astype(np.uint16)
        order = np.argsort(parts_of_rows, kind="stable")
        rows = rows.take(pa.array(order)).combine_chunks()
        ends = np.cumsum(np.bincount(parts_of_rows, minlength=self.key_part_count)).tolist()
        for receiver, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                yield make_message(receiver, sender, _pack(rows.slice(begin, end - begin)))


@dataclass(frozen=True)
class _Decider:
    """Decides the changes of a part of the keys.

    Sends to the receivers: the places of new rows, the numbers of the rows to remove from each file, and the counts of
    rows. `empties_replica` is True if a TRUNCATE removes all rows that the replica had.
    """

    batch_parts: _BatchParts
    empties_replica: bool

    def __call__(self, _: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Decide the changes that readers have sent to one part."""
        yield from guard(self._decide(messages))

    def _decide(self, messages: Sequence[Message]) -> Iterator[pa.RecordBatch]:
        batch_parts, tables_by_sender = self.batch_parts, defaultdict[int, list[pa.Table]](list)
        for sender, content in messages:
            tables_by_sender[sender].append(_unpack(content))
        truncates = pa.concat_tables(
            [_TRUNCATE_SCHEMA.empty_table(), *tables_by_sender.pop(_TRUNCATES_SENDER, [])]
        )
        changes = [
            (sender, table)
            for sender, tables in tables_by_sender.items()
            if sender < batch_parts.change_part_count
            for table in tables
        ]
        if not changes:
            return
        keyed_changes = join_changes([_unpack_changes([table for _, table in changes], truncates)])
        sought_keys, matches = (
            SoughtKeys.from_keys(_label_keys(keyed_changes.keys)),
            dict[int, tuple[Numbers, Numbers]](),
        )
        for sender, tables in tables_by_sender.items():
            if sender >= batch_parts.change_part_count:
                table = pa.concat_tables(tables)
                row_indices, key_indices = sought_keys.find_rows(table.drop_columns("row"))
                matches[sender] = np.asarray(table["row"])[row_indices], key_indices
        outcome = keyed_changes.decide(
            (key_indices for _, key_indices in matches.values()), empties_replica=self.empties_replica
        )
        net_change, has_row = outcome.net, outcome.has_row
        new_places = keyed_changes.places[keyed_changes.first_effective_index :][
            net_change.last_changes[has_row & (net_change.last_changes != NONE)]
        ]
        receivers = _find_parts(new_places, changes)
        for receiver in np.unique(receivers).tolist():
            yield make_message(receiver, 0, new_places[receivers == receiver].tobytes())
        is_replaced = np.zeros_like(outcome.had_row)
        is_replaced[net_change.keys] = not self.empties_replica
        # The task that read a file, and the receiver that writes the file again, have the same number.
        for number, (row_numbers, key_indices) in matches.items():
            if len(removed_numbers := row_numbers[is_replaced[key_indices]]):
                yield make_message(number, 0, removed_numbers.tobytes())
        counts = net_change.count_rows(outcome.had_row) | {
            "conflicts": int(outcome.conflict is not None),
            "changes": int(outcome.has_row_changes),
        }
        yield make_message(batch_parts.writer_count - 1, 0, json.dumps(counts).encode())


@dataclass(frozen=True)
class _Writer:
    """Writes what a receiver was sent; see `_BatchParts` for the receivers.

    The receiver of a part of the changes writes the new rows. The receiver of a file writes the file again without the
    removed rows, or writes a deletion vector if `can_mark_rows` is True. The last receiver sums up the counts.
    `files_task` writes files once it has the rows to write.
    """

    batch_parts: _BatchParts
    files_task: FilesTask
    change_parts: Sequence[Sequence[RowGroup]]
    files: Sequence[ReplicaFile]
    can_mark_rows: bool

    def __call__(self, receiver: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write what a receiver was sent."""
        if receiver == self.batch_parts.writer_count - 1:
            counts = sum(
                (Counter(json.loads(content.to_pybytes())) for _, content in messages), Counter[str]()
            )
            yield _make_result({"counts": counts})
            return
        numbers = np.sort(
            np.concatenate([_NO_ROWS, *(np.frombuffer(content, np.int64) for _, content in messages)])
        )
        if receiver < len(self.change_parts):
            selection = replace(self.files_task.row_selection, places=numbers)
            yield from _write_files(
                replace(self.files_task, change_parts=[self.change_parts[receiver]], row_selection=selection),
                guard,
            )
            return
        file_index = receiver - len(self.change_parts)
        file = self.files[file_index]
        if not self.can_mark_rows:
            match = FileMatches(file.name, file.log_path, file.size_bytes, numbers, _NO_ROWS, _NO_ROWS)
            yield from _write_files(replace(self.files_task, files_to_rewrite=[match]), guard)
            yield _make_result({"file": file_index})
            return
        store, path = self.files_task.store, self.files_task.path
        deleted_numbers = np.sort(np.concatenate([read_vector(store, path, file.deletion_vector), numbers]))
        yield _make_result({"file": file_index, "vector": write_vector(store, path, deleted_numbers)})


def _write_files(files_task: FilesTask, guard: Guard) -> Iterator[pa.RecordBatch]:
    for rows in files_task(0, guard):
        no_results = pa.nulls(rows.num_rows, pa.string())
        yield pa.RecordBatch.from_arrays([*rows.columns, no_results], schema=_RESULT_SCHEMA)


def _make_result(result: Mapping[str, object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"result": json.dumps(result)}], _RESULT_SCHEMA)


def _find_parts(places: Numbers, changes: Sequence[tuple[int, pa.Table]]) -> Numbers:
    """For each of `places`, find the number of the part of the changes that has it."""
    all_places = np.concatenate([np.asarray(table["place"]) for _, table in changes])
    parts = np.repeat([part for part, _ in changes], [table.num_rows for _, table in changes])
    order = np.argsort(all_places)
    return np.asarray(parts[order][np.searchsorted(all_places[order], places)])


def _unpack_changes(tables: Sequence[pa.Table], truncates: pa.Table) -> UnorderedChanges:
    """Unpack the changes that `_Reader` has sent.

    Without a TRUNCATE, `_Reader` sends no LSN and no ordinal: they only tell whether a change is before the TRUNCATE.
    """
    rows = pa.concat_tables(tables)
    keys = rows.select([name for name in rows.column_names if name.startswith("k")])
    lsns, ordinals = (
        np.asarray(rows[name]) if name in rows.column_names else np.zeros(rows.num_rows, np.int64)
        for name in ("lsn", "ordinal")
    )
    places, operations = np.asarray(rows["place"]), np.asarray(rows["operation"])
    no_keys = keys.slice(0, 0)
    return UnorderedChanges(
        places, lsns, ordinals, operations, keys, _NO_ROWS, no_keys, (), no_keys, truncates
    )


def _label_keys(keys: pa.Table) -> pa.Table:
    """Rename the key's columns to k0, k1, …, so that columns such as `place` can be added."""
    return keys.rename_columns([f"k{number}" for number in range(keys.num_columns)])


def _pack(rows: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def _unpack(content: pa.Buffer) -> pa.Table:
    return pa.ipc.open_stream(content).read_all()
