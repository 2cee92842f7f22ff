"""Applies very many changes to one replica table. The keys are divided into parts, and tasks decide each part.

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

from pgsieve.assets.steps.apply.by_files import ManyChanges, RowsTask
from pgsieve.assets.steps.apply.chosen_rows import ChosenRows, is_in
from pgsieve.assets.steps.apply.keyed_changes import ChangesOfKeys, changes_of_keys, join_changes
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, batch_result
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent
from pgsieve.decoding.changes.keys import SoughtKeys, has_bounds, key_parts
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
#: The most rows of the replica per change. If the replica's files have more, `by_files` applies the batch: it looks the
#: keys up in each file, which takes less time per row than to divide the rows by keys.
_MOST_ROWS = 16

#: The columns that tasks return: a row per new file, or a row with only `result`, a JSON text (counts, changed files).
_RESULT = FILE_SCHEMA.append(pa.field("result", pa.string()))
_NO_ROWS = np.empty(0, np.int64)
#: Stands in a message for the sender's number, and says that the message has TRUNCATEs.
_TRUNCATES = -1
_PLACES = pa.schema([("commit_lsn", pa.int64()), ("ordinal", pa.int64())])


@dataclass(frozen=True)
class ReplicaFile:
    """A file of the replica: its name in the table's folder, its path in the log, its bytes, and its deletion vector."""

    name: str
    path: str
    size: int
    vector: Action | None = None


@dataclass(frozen=True)
class KeyPartsWriter:
    """Applies a batch to one replica table at `path` by parts of its keys; `changes_path` has the transformed changes."""

    lake: Lake
    path: str
    changes_path: str
    definition: Definition
    pending: PendingChanges
    end: int

    def apply(self, stored: ManyChanges) -> TableResult | None:
        """Apply the changes; None if there is a key conflict, or if the batch cannot be divided by keys."""
        if not self._is_divisible:
            return None
        with self.lake.access.translate_errors(self.path):
            return self._write(stored)

    @property
    def _is_divisible(self) -> bool:
        """Whether the batch is large enough, and each key can be decided from its own changes alone.

        An UPDATE that moves a row to another key concerns two keys. An unsent TOAST value may come from another change.
        """
        pending, definition = self.pending, self.definition
        return (
            _count_changes(pending) >= self.lake.policy.min_parted_changes
            and bool(definition.key)
            and not definition.soft_delete_columns
            and not (pending.unchanged or pending.key_changes)
        )

    def _plan(self, stored: ManyChanges, keys: pa.Schema) -> "_Plan | None":
        """The replica's files that may have one of the keys, and how to remove rows from them.

        None if the files have too many rows, or if they can neither be rewritten nor get deletion vectors.
        """
        path, pending, columns, committer = self.path, self.pending, self.definition.names, stored.committer
        with self.lake.access.translate_errors(self.changes_path):
            files_of_changes = dict.fromkeys(group.file for group in stored.groups)
            bounds = [_read_bounds(committer.local.store, file, keys) for file in files_of_changes]
        table, max_rows = committer.local.open_table(path), _MOST_ROWS * _count_changes(pending)
        files = find_stored_files(table, [file_bounds for file_bounds in bounds if file_bounds is not None])
        if sum(file.row_count or 0 for file in files) > max_rows:
            return None
        deletion = RowDeletion(self.lake, committer, path, columns, pending.size)
        removes_rows = not stored.empties_replica and pending.count("update", "delete") > 0
        is_small = not removes_rows or sum(file.size_bytes for file in files) <= deletion.max_rewritten_bytes
        if not files or (is_small and committer.can_rewrite_files(path, columns)):
            return _Plan([ReplicaFile(file.name, file.log_path, file.size_bytes) for file in files])
        # Deletion vectors have to be enabled by a property of the table. INSERTs alone must not enable them.
        if not deletion.can_mark_rows or not (removes_rows or committer.local.has_deletion_vectors(path)):
            return None
        added = committer.find_markable_files(path, {file.name for file in files}, pending.head.version)
        vectors = [] if added is None else [added[file.name].get("deletionVector") for file in files]
        if added is None or any(vector and parse_vector_file(vector) is None for vector in vectors):
            return None
        return _Plan(
            [ReplicaFile(f.name, f.log_path, f.size_bytes, v) for f, v in zip(files, vectors, strict=True)],
            added,
        )

    def _write(self, stored: ManyChanges) -> TableResult | None:
        """Let tasks decide the changes and write files, and commit the files; None if there is a conflict."""
        path, pending, committer, schema = self.path, self.pending, stored.committer, stored.schema
        keys = pa.schema([schema.field(name) for name in self.definition.key])
        plan = self._plan(stored, keys)
        if plan is None:
            return None
        runner, store, files = self.lake.policy.choose_runner(pending.size), self.lake.store, plan.files
        parts = divide_groups(stored.groups, runner.parallelism)
        key_part_count = max(runner.parallelism, -(-_count_changes(pending) // _PART_CHANGES))
        file_part_count = min(len(files), 2 * runner.parallelism)
        batch = _BatchOfKeys(keys, pending.extent, len(parts), len(files))
        chosen = ChosenRows(pending.extent, Stamp(stored.stamp))
        replica_schema, size = committer.local.arrow_schema(path), committer.target_file_bytes(path, {})
        writes = RowsTask(store, path, schema, replica_schema, size, (), (), (), chosen)
        rows = runner.exchange(
            _Reader(batch, store, path, parts, files, file_part_count, key_part_count),
            len(parts) + file_part_count,
            [
                Receivers(key_part_count, _Decider(batch, stored.empties_replica)),
                Receivers(batch.target_count, _Writer(batch, writes, parts, files, plan.added is not None)),
            ],
            _RESULT,
        )
        return self._commit(stored, plan, rows)

    def _commit(self, stored: ManyChanges, plan: "_Plan", rows: pa.Table) -> TableResult | None:
        path, pending, base = self.path, self.pending, self.pending.head.version
        results = [json.loads(text) for text in rows["result"].to_pylist() if text is not None]
        counts = sum((Counter(result["counts"]) for result in results if "counts" in result), Counter[str]())
        if counts["conflicts"]:
            return None
        new_files = rows.filter(pc.is_valid(rows["path"])).select(FILE_SCHEMA.names)
        changed_files = [
            (plan.files[result["file"]], result.get("vector")) for result in results if "file" in result
        ]
        if plan.added is not None and changed_files:
            marked_files = [MarkedFile(plan.added[file.name], None, vector) for file, vector in changed_files]
            stored.committer.commit_marked(lambda: new_files, path, marked_files, self.end, base)
        elif counts["changes"] or pending.truncated_at is not None:
            removed = {file.path: file.size for file, _ in changed_files}
            commit = Commit(self.end, overwrite=stored.empties_replica, expected_version=base)
            stored.committer.commit(lambda: new_files, path, stored.schema, commit, removed)
        return batch_result(self.lake, path, pending, self.end, **pending.row_counts(counts))


@dataclass(frozen=True)
class _Plan:
    """The replica's files that may have keys of the batch.

    If rows are marked in deletion vectors, `added` maps the name of each file to its `add` action in the Delta log. It
    is None if the files are rewritten instead.
    """

    files: Sequence[ReplicaFile]
    added: Mapping[str, Action] | None = None


def _count_changes(pending: PendingChanges) -> int:
    return pending.count("insert", "update", "delete")


def _read_bounds(store: Store, file: str, keys: pa.Schema) -> dict[str, Bounds] | None:
    """The lowest and highest value of each key column in a file of the change history; None if the file has no keys."""
    # Statistics are found by a path such as `new.id`. If the column's name has a dot, the path may be of another column.
    kinds = {key.name: key.type for key in keys if "." not in key.name and has_bounds(key.type)}
    stored = store.row_group_bounds(
        file, {f"{side}.{name}": kind for side in SIDES for name, kind in kinds.items()}
    )
    bounds = dict[str, Bounds]()
    for name, kind in kinds.items():
        all_bounds = [bound for side in SIDES for bound in stored.get(f"{side}.{name}", [None])]
        if not all_bounds:
            return None
        known_bounds = [bound for bound in all_bounds if bound is not None]
        if len(known_bounds) == len(all_bounds):
            extremes = pc.min_max(pa.array([value for bound in known_bounds for value in bound], kind))
            bounds[name] = extremes["min"], extremes["max"]
    return bounds


@dataclass(frozen=True)
class _BatchOfKeys:
    """What all tasks of a batch know: the key's columns, and the extent of the changes.

    `parts` is the number of parts of the changes, `files` the number of files of the replica. The receivers that write
    are numbered in this order: one per part of the changes, which writes the new rows of the part; one per file of the
    replica; and one that sums up the counts.
    """

    keys: pa.Schema
    extent: Extent
    parts: int
    files: int

    @property
    def target_count(self) -> int:
        """The number of receivers that write."""
        return self.parts + self.files + 1


@dataclass(frozen=True)
class _Reader:
    """Reads the keys of the changes and of the replica's files, and sends each key to the part that decides it.

    `file_task_count` is the number of tasks that read files of the replica. `key_part_count` is the number of parts of the keys.
    """

    batch: _BatchOfKeys
    store: Store
    path: str
    parts: Sequence[Sequence[RowGroup]]
    files: Sequence[ReplicaFile]
    file_task_count: int
    key_part_count: int

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Send the changes of a part, or the rows of some files."""
        if number < len(self.parts):
            yield from guard(self._send_changes(number))
        else:
            for place in range(number - len(self.parts), len(self.files), self.file_task_count):
                yield from guard(self._send_rows(place))

    def _send_changes(self, number: int) -> Iterator[pa.RecordBatch]:
        batch = self.batch
        names = [*PLACE_COLUMNS, *(f"{side}.{name}" for side in SIDES for name in batch.keys.names)]
        for _, read in self.store.group_readers(self.parts[number]):
            changes = changes_of_keys(read(names), batch.keys, (), batch.extent)
            if changes.truncates.num_rows:
                for part in range(self.key_part_count):
                    yield make_message(part, _TRUNCATES, _pack(changes.truncates))
            rows = _label_keys(changes.keys).append_column("place", pa.array(changes.places))
            rows = rows.append_column("operation", pa.array(changes.operations))
            if batch.extent.truncated_at is not None:
                rows = rows.append_column("lsn", pa.array(changes.commit_lsns))
                rows = rows.append_column("ordinal", pa.array(changes.ordinals))
            yield from self._messages(number, changes.keys, rows)

    def _send_rows(self, number: int) -> Iterator[pa.RecordBatch]:
        file, begin = self.files[number], 0
        deleted = read_vector(self.store, self.path, file.vector)
        for batch in self.store.read_batches(join_path(self.path, file.name), self.batch.keys):
            rows = np.arange(begin, begin + batch.num_rows)
            keys, begin = pa.Table.from_batches([batch]), begin + batch.num_rows
            if (is_deleted := is_in(rows, deleted)).any():
                keys, rows = keys.filter(pa.array(~is_deleted)), rows[~is_deleted]
            labelled_rows = _label_keys(keys).append_column("row", pa.array(rows))
            yield from self._messages(len(self.parts) + number, keys, labelled_rows)

    def _messages(self, number: int, keys: pa.Table, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Messages with the rows of each part of the keys."""
        # NumPy sorts numbers of two bytes without comparing them.
        key_part = key_parts(keys, self.key_part_count).astype(np.uint16)
        order = np.argsort(key_part, kind="stable")
        rows = rows.take(pa.array(order)).combine_chunks()
        ends = np.cumsum(np.bincount(key_part, minlength=self.key_part_count)).tolist()
        for receiver, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                yield make_message(receiver, number, _pack(rows.slice(begin, end - begin)))


@dataclass(frozen=True)
class _Decider:
    """Decides the changes of a part of the keys.

    Sends to the receivers: the places of new rows, the numbers of the rows to remove from each file, and the counts of
    rows. `empties_replica` is True if a TRUNCATE removes all rows that the replica had.
    """

    batch: _BatchOfKeys
    empties_replica: bool

    def __call__(self, _: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Decide the changes that readers have sent to one part."""
        yield from guard(self._decide(messages))

    def _decide(self, messages: Sequence[Message]) -> Iterator[pa.RecordBatch]:
        batch, received = self.batch, defaultdict[int, list[pa.Table]](list)
        for sender, content in messages:
            received[sender].append(_unpack(content))
        truncates = pa.concat_tables([_PLACES.empty_table(), *received.pop(_TRUNCATES, [])])
        changes = [
            (sender, table) for sender, tables in received.items() if sender < batch.parts for table in tables
        ]
        if not changes:
            return
        keyed = join_changes([_unpack_changes([table for _, table in changes], truncates)])
        sought, matches = SoughtKeys.of(_label_keys(keyed.keys)), dict[int, tuple[Numbers, Numbers]]()
        for sender, tables in received.items():
            if sender >= batch.parts:
                table = pa.concat_tables(tables)
                row, key = sought.within(table.drop_columns("row"))
                matches[sender] = np.asarray(table["row"])[row], key
        decided = keyed.decide((key for _, key in matches.values()), empties=self.empties_replica)
        net, remains = decided.net, decided.remains
        new_places = keyed.places[keyed.first_effective :][net.last[remains & (net.last != NONE)]]
        receivers = _find_parts(new_places, changes)
        for receiver in np.unique(receivers).tolist():
            yield make_message(receiver, 0, new_places[receivers == receiver].tobytes())
        is_replaced = np.zeros_like(decided.before)
        is_replaced[net.keys] = not self.empties_replica
        for receiver, (row, key) in matches.items():
            if len(removed := row[is_replaced[key]]):
                yield make_message(receiver, 0, removed.tobytes())
        counts = net.counts(decided.before) | {
            "conflicts": int(decided.conflict is not None),
            "changes": int(decided.changes_rows),
        }
        yield make_message(batch.target_count - 1, 0, json.dumps(counts).encode())


@dataclass(frozen=True)
class _Writer:
    """Writes what a receiver was sent; see `_BatchOfKeys` for the receivers.

    The receiver of a part of the changes writes the new rows. The receiver of a file writes the file again without the
    removed rows, or writes a deletion vector if `can_mark_rows` is True. The last receiver sums up the counts. `write_task` is the
    task that writes files, before its rows are chosen.
    """

    batch: _BatchOfKeys
    write_task: RowsTask
    parts: Sequence[Sequence[RowGroup]]
    files: Sequence[ReplicaFile]
    can_mark_rows: bool

    def __call__(self, number: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write what a receiver was sent."""
        if number == self.batch.target_count - 1:
            counts = sum(
                (Counter(json.loads(content.to_pybytes())) for _, content in messages), Counter[str]()
            )
            yield _result({"counts": counts})
            return
        numbers = np.sort(
            np.concatenate([_NO_ROWS, *(np.frombuffer(each, np.int64) for _, each in messages)])
        )
        if number < len(self.parts):
            chosen = replace(self.write_task.chosen, kept=numbers)
            yield from _results(replace(self.write_task, parts=[self.parts[number]], chosen=chosen), guard)
            return
        place = number - len(self.parts)
        file = self.files[place]
        if not self.can_mark_rows:
            match = FileMatches(file.name, file.path, file.size, numbers, _NO_ROWS, _NO_ROWS)
            yield from _results(replace(self.write_task, rewritten=[match]), guard)
            yield _result({"file": place})
            return
        store, path = self.write_task.store, self.write_task.path
        deleted = np.sort(np.concatenate([read_vector(store, path, file.vector), numbers]))
        yield _result({"file": place, "vector": write_vector(store, path, deleted)})


def _results(writes: RowsTask, guard: Guard) -> Iterator[pa.RecordBatch]:
    for rows in writes(0, guard):
        texts = pa.nulls(rows.num_rows, pa.string())
        yield pa.RecordBatch.from_arrays([*rows.columns, texts], schema=_RESULT)


def _result(result: Mapping[str, object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"result": json.dumps(result)}], _RESULT)


def _find_parts(places: Numbers, changes: Sequence[tuple[int, pa.Table]]) -> Numbers:
    """The number of the part of the changes that each of `places` is in."""
    all_places = np.concatenate([np.asarray(table["place"]) for _, table in changes])
    parts = np.repeat([part for part, _ in changes], [table.num_rows for _, table in changes])
    order = np.argsort(all_places)
    return np.asarray(parts[order][np.searchsorted(all_places[order], places)])


def _unpack_changes(tables: Sequence[pa.Table], truncates: pa.Table) -> ChangesOfKeys:
    """The changes that `_Reader` has sent.

    Without a TRUNCATE, `_Reader` leaves out LSN and ordinal: they only tell whether a change is before the TRUNCATE.
    """
    rows = pa.concat_tables(tables)
    keys = rows.select([name for name in rows.column_names if name.startswith("k")])
    lsns, ordinals = (
        np.asarray(rows[name]) if name in rows.column_names else np.zeros(rows.num_rows, np.int64)
        for name in ("lsn", "ordinal")
    )
    places, operations = np.asarray(rows["place"]), np.asarray(rows["operation"])
    no_keys = keys.slice(0, 0)
    return ChangesOfKeys(places, lsns, ordinals, operations, keys, _NO_ROWS, no_keys, (), no_keys, truncates)


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
