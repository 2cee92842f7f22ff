"""Many changes of a replica, applied by files: the rows and counts equal those of the changes applied one by one. No JVM."""

from __future__ import annotations

import datetime as dt
import json
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, permutations, zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Field, Transaction, write_deltalake

from pgsieve.assets.steps.apply import by_files, completion, key_exchange, key_reader
from pgsieve.assets.steps.apply.key_conflicts import KeyConflictError
from pgsieve.assets.steps.apply.key_reader import KeyReader
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.decoding.values.datetimes import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY
from pgsieve.resources.lake.delta.compaction import compact
from pgsieve.resources.lake.delta.key_lookup import Flag
from pgsieve.resources.lake.delta.records import APPLICATION_ID
from pgsieve.resources.lake.delta.row_removal import enable_marking
from tests.fixtures.replica_changes import (
    ENDS,
    Change,
    Changes,
    Columns,
    Row,
    count_rows,
    definition,
    delete,
    draw_changes,
    find_many_changes,
    find_outcome,
    followed,
    insert,
    row,
    update,
)


@pytest.mark.slow
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
def test_random_changes_leave_the_rows_of_changes_applied_one_by_one(
    tmp_path: Path, key: tuple[str, ...]
) -> None:
    conflicts = 0
    for seed in range(14):
        rows, changes = draw_changes(random.Random(seed))
        files, few = (Changes(tmp_path / f"{seed}{way}", rows, changes) for way in ("files", "few"))
        before, after = files.rows(), followed(rows, changes, key)
        expected = find_outcome(few.one_by_one, key)
        done = find_outcome(files.by_files, key)
        assert (after is None) == isinstance(done, KeyConflictError), f"seed {seed}"
        if isinstance(expected, KeyConflictError):
            conflicts += 1
            assert isinstance(done, KeyConflictError), f"seed {seed}"
            assert (done.message, done.commit_lsn) == (expected.message, expected.commit_lsn), f"seed {seed}"
            assert files.rows() == before, f"seed {seed}"
            continue
        assert isinstance(done, TableResult), f"seed {seed}"
        assert count_rows(done) == count_rows(expected), f"seed {seed}"
        assert files.rows() == few.rows() == after, f"seed {seed}"
        written = files.lake.records.position(files.path) == ENDS[-1]
        assert written == (few.lake.records.position(few.path) == ENDS[-1]), f"seed {seed}"
    assert 0 < conflicts < 12


@pytest.mark.drawn
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_random_changes_leave_the_same_rows_with_deletion_vectors(
    tmp_path: Path, key: tuple[str, ...], checkpointed: bool
) -> None:
    applied = 0
    for seed in range(12):
        rows, changes = draw_changes(random.Random(seed))
        if not changes:
            continue
        # Rows that are already gone have deletion vectors: in files with other rows, and in a file without any.
        gone = [row(1000 + number, "gone") for number in range(14)]
        mixed = [each for pair in zip_longest(rows, gone) for each in pair if each]
        marked = Changes(tmp_path / f"{seed}marked", mixed, changes)
        marked.lake.policy = replace(marked.lake.policy, rewritten_bytes=-1)
        marked.mark(gone, 110, checkpointed=checkpointed)
        few = Changes(tmp_path / f"{seed}few", rows, changes)
        assert marked.rows() == few.rows(), f"seed {seed}"
        expected = find_outcome(few.one_by_one, key)
        done = find_outcome(marked.by_files, key)
        if isinstance(expected, KeyConflictError):
            assert isinstance(done, KeyConflictError), f"seed {seed}"
            assert (done.message, done.commit_lsn) == (expected.message, expected.commit_lsn), f"seed {seed}"
        else:
            assert isinstance(done, TableResult), f"seed {seed}"
            assert count_rows(done) == count_rows(expected), f"seed {seed}"
            applied += 1
        assert marked.rows() == few.rows(), f"seed {seed}"
        if checkpointed:
            DeltaTable(marked.path).create_checkpoint()
            assert marked.rows() == few.rows(), f"seed {seed}"
    assert applied > 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 20, 100])
@pytest.mark.parametrize("way", ["by_files", "by_key_parts"])
def test_unsent_values_beyond_the_memory_of_a_task_leave_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, way: str
) -> None:
    monkeypatch.setattr(completion, "MEMORY_BYTES", size)
    applied = 0
    for seed in range(12):
        rows, changes = draw_changes(random.Random(seed))
        if (after := followed(rows, changes, ("k",))) is None:
            continue
        files = Changes(tmp_path / f"{seed}", rows, changes)
        getattr(files, way)(definition("k"))
        assert files.rows() == after, f"seed {seed}"
        applied += any(change.unchanged for change in changes)
    assert applied > 4


@pytest.mark.slow
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
@pytest.mark.parametrize("marking", [False, True])
def test_parts_of_the_keys_leave_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...], *, marking: bool
) -> None:
    """Changes are never decided by all keys at once, unless they conflict."""
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 3)
    applied = moved = 0
    for seed in range(24):
        rows, changes = draw_changes(random.Random(seed))
        parts, few = (Changes(tmp_path / f"{seed}{way}", rows, changes) for way in ("parts", "few"))
        if marking:
            parts.lake.policy = replace(parts.lake.policy, rewritten_bytes=-1)
            parts.mark(parts.rows()[:1], 110, checkpointed=bool(seed % 2))
            few.mark(few.rows()[:1], 110, checkpointed=False)
        expected = find_outcome(few.one_by_one, key)
        with monkeypatch.context() as alone:
            if isinstance(expected, TableResult):
                alone.setattr(by_files, "make_keyed_changes", None)
                alone.setattr(key_exchange, "_MAX_ROWS_PER_CHANGE", seed % 3)
                moved += sum(change.is_move and bool(change.unchanged) for change in changes)
            done = find_outcome(parts.by_key_parts, key)
        if isinstance(expected, KeyConflictError):
            assert isinstance(done, KeyConflictError), f"seed {seed}"
            assert (done.message, done.commit_lsn) == (expected.message, expected.commit_lsn), f"seed {seed}"
            continue
        assert isinstance(done, TableResult), f"seed {seed}"
        assert count_rows(done) == count_rows(expected), f"seed {seed}"
        assert parts.rows() == few.rows(), f"seed {seed}"
        applied += 1
    assert applied > 12
    assert moved > 12


@pytest.mark.parametrize("lost_count", [1, 3, 9])
def test_moves_that_depend_on_a_missing_row_leave_the_rows_of_changes_applied_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_count: int
) -> None:
    """Each round of the parts finds one more of the moves. After many rounds the driver decides."""
    rows = [row(key, f"before {key}") for key in range(50, 70)]
    found = [update(row(key + 20, "found"), row(key, "")) for key in range(50, 60)]
    lost = [update(row(key + 1, "lost"), row(key, "")) for key in range(1, lost_count + 1)]
    # Key 2 gets no row by the first move, so this is no conflict.
    changes = [*lost, *found, delete(row(lost_count + 1, "")), insert(row(2, "inserted"))]
    parts, few = (Changes(tmp_path / way, rows, changes) for way in ("parts", "few"))
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 2)
    with monkeypatch.context() as alone:
        if lost_count < key_exchange._MAX_ATTEMPTS:
            alone.setattr(by_files, "make_keyed_changes", None)
        done = parts.by_key_parts(definition("k"))
    assert count_rows(done) == count_rows(few.one_by_one(definition("k")))
    assert parts.rows() == few.rows()
    assert row(2, "inserted") in parts.rows()


@pytest.mark.parametrize("move_count", [1, 2, 3, 4, 5, 11, 15, 16])
@pytest.mark.parametrize("sent", [True, False])
def test_a_value_is_found_that_none_of_several_moves_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move_count: int, *, sent: bool
) -> None:
    """n rounds of the resolvers follow 2**n - 1 moves. After even more moves the driver decides."""
    monkeypatch.setattr(key_exchange, "_RESOLVER_STAGES", (2, 4))
    rows = [row(key, f"before {key}") for key in range(50, 70)]
    begun = [insert(row(1, "sent"))] if sent else []
    first = 1 if sent else 50
    keys = [first, *range(100, 100 + move_count)]
    moves = [update(row(new, ""), row(old, ""), ["v"]) for old, new in pairwise(keys)]
    again = [insert(row(first, "again")), update(row(60, ""), None, ["v"])]
    changes = [*begun, *moves, *again]
    parts, few = (Changes(tmp_path / way, rows, changes) for way in ("parts", "few"))
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 2)
    with monkeypatch.context() as alone:
        if move_count < 16:
            alone.setattr(by_files, "make_keyed_changes", None)
        done = parts.by_key_parts(definition("k"))
    assert count_rows(done) == count_rows(few.one_by_one(definition("k")))
    assert parts.rows() == few.rows()
    assert row(keys[-1], "sent" if sent else "before 50") in parts.rows()


@pytest.mark.parametrize("key", [("k",), ()])
def test_few_rows_of_a_large_replica_are_divided_by_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...]
) -> None:
    sent = list[int]()

    def noted(reader: KeyReader, file_index: int) -> Iterator[pa.RecordBatch]:
        for message in send_rows(reader, file_index):
            sent.append(pa.ipc.open_stream(message.column("content")[0].as_buffer()).read_all().num_rows)
            yield message

    send_rows = KeyReader._send_rows
    monkeypatch.setattr(KeyReader, "_send_rows", noted)
    rows = [row(number, "before") for number in range(400)]
    changes = [update(row(number, "after"), row(number, "before")) for number in (7, 200, 399)]
    made = Changes(tmp_path, rows, changes)
    made.by_key_parts(definition(*key))
    assert sum(each["v"] == "after" for each in made.rows()) == 3
    assert 3 <= sum(sent) < 100


@pytest.mark.slow
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
def test_parts_of_the_keys_are_examined_for_conflicts_without_a_commit(
    tmp_path: Path, key: tuple[str, ...]
) -> None:
    refused = 0
    for seed in range(24):
        rows, changes = draw_changes(random.Random(seed))
        parts, few = (Changes(tmp_path / f"{seed}{way}", rows, changes) for way in ("parts", "few"))
        before = set(tmp_path.glob(f"{seed}parts/**/*"))
        can_be_applied = parts.can_be_applied_by_key_parts(definition(*key))
        assert set(tmp_path.glob(f"{seed}parts/**/*")) == before, f"seed {seed}"
        expected = find_outcome(few.one_by_one, key)
        if isinstance(expected, KeyConflictError):
            assert not can_be_applied, f"seed {seed}"
        else:
            assert can_be_applied, f"seed {seed}"
        refused += not can_be_applied
    assert 0 < refused < 20


@pytest.mark.parametrize(
    ("kind", "spark", "keys"),
    [
        (pa.date32(), "date", [dt.date(1, 1, 1), dt.date(2026, 1, 1), dt.date(9999, 12, 31)]),
        (
            pa.timestamp("us", "UTC"),
            "timestamp",
            [dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in (1, 2, 3)],
        ),
        (pa.list_(pa.int64()), "array<bigint>", [[1, None], [], [2]]),
        (pa.float64(), "double", [0.0, float("nan"), 2.5]),
    ],
    ids=str,
)
def test_keys_of_every_type_are_applied_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, spark: str, keys: list[object]
) -> None:
    columns: Columns = (("k", kind), ("v", pa.string()))
    replicated = Definition((("k", spark), ("v", "string")), ("k",), Layout(1, (), 2, ()))
    monkeypatch.setattr(by_files, "make_keyed_changes", None)
    for number, (kept, changed, added) in enumerate(permutations(keys)):
        rows: list[Row] = [{"k": kept, "v": "before"}, {"k": changed, "v": "before"}]
        changes = [insert({"k": added, "v": "new"}), update({"k": changed, "v": "after"})]
        made = Changes(tmp_path / str(number), rows, changes, columns)
        assert count_rows(made.by_key_parts(replicated)) == (1, 1, 0, 0)
        expected = {str(kept): "before", str(changed): "after", str(added): "new"}
        assert {str(each["k"]): each["v"] for each in made.rows()} == expected


def test_inserts_of_a_table_without_a_key_are_appended(tmp_path: Path) -> None:
    same = [row(1, "same")] * 3
    changes = Changes(tmp_path, same, [insert(row(1, "same"))] * 4)
    assert count_rows(changes.by_files(definition())) == (4, 0, 0, 0)
    assert changes.rows() == [row(1, "same")] * 7


def test_only_files_that_lose_rows_are_rewritten(tmp_path: Path) -> None:
    rows = [row(key, "before") for key in range(21)]
    changes = Changes(tmp_path, rows, [update(row(3, "after")), insert(row(30, "new"))])
    before = set((tmp_path / "replica").glob("*.parquet"))
    changes.by_files(definition("k"))
    local = changes.lake.delta_rs
    assert local is not None
    kept = {
        Path(p).name for p in pa.table(local.open_table(changes.path).get_add_actions())["path"].to_pylist()
    }
    assert len(kept & {path.name for path in before}) == len(before) - 1
    after = [row(3, "after"), row(30, "new")]
    assert {tuple(r.values()) for r in changes.rows()} == {
        tuple(r.values()) for r in [*(r for r in rows if r["k"] != 3), *after]
    }


@pytest.mark.parametrize(
    ("limit", "size"),
    [("KEY_BYTES", 10), ("rewritten_bytes", -1)],
)
def test_too_many_changes_for_this_process_are_left_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, size: int
) -> None:
    again = [delete(row(3, "")), insert(row(3, "a")), delete(row(3, "")), insert(row(3, "b"))]
    changes = Changes(tmp_path, [row(3, "before")], again, vectors=False)
    assert find_many_changes(changes.lake, changes.path, changes.log, definition("k"), changes.pending())
    if limit.islower():
        changes.lake.policy = replace(changes.lake.policy, **{limit: size})
    else:
        monkeypatch.setattr(by_files, limit, size)
    assert (
        find_many_changes(changes.lake, changes.path, changes.log, definition("k"), changes.pending()) is None
    )


def test_nothing_is_written_before_all_tables_are_searched_for_conflicts(tmp_path: Path) -> None:
    """A conflict in another table must leave this table unchanged."""
    changes = Changes(tmp_path, [row(3, "before")], [update(row(3, "after"))])
    changes.lake.policy = replace(changes.lake.policy, rewritten_bytes=-1)
    before = changes.lake.records.version(changes.path)
    decided = find_many_changes(changes.lake, changes.path, changes.log, definition("k"), changes.pending())
    assert decided is not None
    assert decided.net_change is not None
    assert decided.net_change.deleted_rows.are_marked
    assert 0 < decided.nbytes < 1_000
    assert changes.lake.records.version(changes.path) == before


_BC = -735_000  # days since 1970-01-01


@pytest.mark.parametrize(
    ("kind", "spark", "value", "text"),
    [
        (pa.date32(), "date", _BC, "0044-08-22 BC"),
        (pa.timestamp("us"), "timestamp_ntz", TIMESTAMP_MINUS_INFINITY, "-infinity"),
        (pa.timestamp("us", "UTC"), "timestamp", TIMESTAMP_INFINITY, "infinity"),
        (pa.timestamp("us", "UTC"), "timestamp", _BC * 86_400_000_000, "0044-08-22 00:00:00+00 BC"),
    ],
)
@pytest.mark.parametrize("way", ["by_files", "one_by_one"])
def test_a_conflict_shows_a_key_beyond_pythons_range_as_postgresql_prints_it(
    tmp_path: Path, way: str, kind: pa.DataType, spark: str, value: int, text: str
) -> None:
    key = pa.scalar(value, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    columns = (("k", kind), ("v", pa.string()))
    sent = [insert({"k": key, "v": "again"})]
    changes = Changes(tmp_path, [{"k": key, "v": "before"}], sent, columns)
    replicated = Definition((("k", spark), ("v", "string")), ("k",), Layout(1, (), 2, ()))
    with pytest.raises(KeyConflictError) as refused:
        getattr(changes, way)(replicated)
    assert f"Key (k)=({text})," in refused.value.message


def _adds_column(changes: Changes) -> None:
    """A user's column with a value in each row."""
    table = DeltaTable(changes.path)
    table.alter.add_columns([Field("mine", "string")])
    table.update({"mine": "'kept'"})


def _constrains(changes: Changes) -> None:
    DeltaTable(changes.path).alter.add_constraint({"small": "k < 1000"})


def _partitions(changes: Changes) -> None:
    """Rewrite the replica partitioned, as another writer might. Its position stays."""
    local = changes.lake.delta_rs
    assert local is not None
    rows = local.read_all_rows(changes.path)
    local.remove(changes.path)
    write_deltalake(changes.path, rows, partition_by=["t"])
    local.append(changes.path, rows.schema.empty_table(), 100)


def _mine(changes: Changes) -> set[tuple[object, ...]]:
    return {tuple(row.values()) for row in changes.rows()}


@pytest.mark.parametrize("alter", [_adds_column, _constrains, _partitions])
def test_a_replica_that_a_user_altered_is_written_by_a_writer_that_respects_it(
    tmp_path: Path, alter: Callable[[Changes], None]
) -> None:
    changes = Changes(
        tmp_path,
        [row(3, "before"), row(4, "before")],
        [update(row(3, "after")), insert(row(7, "new"))],
    )
    assert find_many_changes(changes.lake, changes.path, changes.log, definition("k"), changes.pending())
    alter(changes)
    assert (
        find_many_changes(changes.lake, changes.path, changes.log, definition("k"), changes.pending()) is None
    )
    changes.one_by_one(definition("k"))
    mine = ("kept",) if alter is _adds_column else ()
    assert _mine(changes) == {
        (*row(3, "after").values(), *mine),
        (*row(4, "before").values(), *mine),
        (*row(7, "new").values(), *(None for _ in mine)),
    }


#: The protocols of tables with column mapping: with lists of features, and without.
_MAPPING_PROTOCOLS = {
    "features": {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["columnMapping"],
        "writerFeatures": ["appendOnly", "columnMapping", "invariants"],
    },
    "features of writers": {
        "minReaderVersion": 2,
        "minWriterVersion": 7,
        "writerFeatures": ["appendOnly", "columnMapping", "invariants"],
    },
    "versions": {"minReaderVersion": 2, "minWriterVersion": 5},
}


def _maps_names(changes: Changes, protocol: str) -> None:
    """Make the replica anew with column mapping: each column has the name of another one in the files."""
    local, names = changes.lake.delta_rs, changes.schema.names
    assert local is not None
    rows = [local.read_all_rows(changes.path).slice(begin, 10) for begin in range(0, 40, 10)]
    local.remove(changes.path)
    fields = [
        {
            "name": name,
            "type": {"string": "string", "int64": "long", "bool": "boolean"}[
                str(changes.schema.field(name).type)
            ],
            "nullable": True,
            "metadata": {"delta.columnMapping.id": 7 - number, "delta.columnMapping.physicalName": stored},
        }
        for number, (name, stored) in enumerate(zip(names, [*names[1:], names[0]], strict=True))
    ]
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "7"},
        "createdTime": 1,
    }
    (entries := Path(changes.path, "_delta_log")).mkdir(parents=True)
    actions = [{"protocol": _MAPPING_PROTOCOLS[protocol]}, {"metaData": metadata}]
    (entries / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    position = CommitProperties(app_transactions=[Transaction(APPLICATION_ID, 100)])
    for part in rows:
        write_deltalake(changes.path, part, mode="append", commit_properties=position)


def _logged_schema(changes: Changes) -> object:
    """The schema of the replica as its log has it, with the names and numbers of columns in files."""
    return json.loads(DeltaTable(changes.path).schema().to_json())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by_files", "by_key_parts"])
@pytest.mark.parametrize("protocol", _MAPPING_PROTOCOLS)
@pytest.mark.parametrize("marking", [False, True])
def test_random_changes_of_mapped_columns_leave_the_same_rows(
    tmp_path: Path, way: str, protocol: str, *, marking: bool
) -> None:
    applied = marked = 0
    for seed in range(12):
        rows, changes = draw_changes(random.Random(seed))
        if (after := followed(rows, changes, ("k",))) is None:
            continue
        mapped = Changes(tmp_path / f"{seed}", rows, changes)
        _maps_names(mapped, protocol)
        before = _logged_schema(mapped)
        if marking and protocol != "versions":
            assert mapped.lake.delta_rs is not None
            mapped.lake.policy = replace(mapped.lake.policy, rewritten_bytes=-1)
            enable_marking(mapped.lake.delta_rs, mapped.path)
        getattr(mapped, way)(definition("k"))
        assert mapped.rows() == after, f"seed {seed}"
        assert _logged_schema(mapped) == before, f"seed {seed}"
        required = DeltaTable(mapped.path).protocol().reader_features
        assert required is None or "columnMapping" in required, f"seed {seed}"
        marked += pa.table(DeltaTable(mapped.path).deletion_vectors().read_all()).num_rows
        for file in Path(mapped.path).rglob("*.parquet"):
            fields = pq.read_schema(file)
            assert fields.names == ["t", "v", "k"], f"seed {seed}"
            assert [f.metadata[b"PARQUET:field_id"] for f in fields] == [b"7", b"6", b"5"], f"seed {seed}"
        applied += 1
    assert applied > 4
    assert bool(marked) == (marking and protocol != "versions")


def test_rows_of_mapped_columns_are_found_without_a_key(tmp_path: Path) -> None:
    same = [row(1, "same")] * 3
    changes = Changes(tmp_path, same, [delete(row(1, "same")), update(row(2, "new"), row(1, "same"))])
    _maps_names(changes, "features")
    assert count_rows(changes.by_files(definition())) == (1, 0, 2, 0)
    assert changes.rows() == [row(1, "same"), row(2, "new")]


def test_flagged_rows_are_found_in_mapped_columns(tmp_path: Path) -> None:
    columns: Columns = (("k", pa.int64()), ("is_set", pa.bool_()), ("was_set", pa.bool_()))
    rows: list[Row] = [
        {"k": 1, "is_set": True},
        {"k": 2, "is_set": False, "was_set": True},
        {"k": 3, "was_set": True},
    ]
    changes = Changes(tmp_path, rows, [], columns)
    _maps_names(changes, "features")
    local = changes.lake.delta_rs
    assert local is not None
    for is_set, null_column, expected in ((True, None, [0]), (False, None, [1, 2]), (True, "was_set", [0])):
        found = local.find_flagged_rows(changes.path, Flag("is_set", is_set, null_column), None)
        assert [number for match in found for number in match.row_numbers.tolist()] == expected


def test_a_truncate_of_mapped_columns_keeps_their_names(tmp_path: Path) -> None:
    changes = Changes(tmp_path, [row(1, "before")], [Change("truncate"), insert(row(2, "after"))])
    _maps_names(changes, "features")
    before = _logged_schema(changes)
    assert count_rows(changes.by_files(definition("k")))[0] == 1
    assert (changes.rows(), _logged_schema(changes)) == ([row(2, "after")], before)


def test_inserts_keep_a_users_additions(tmp_path: Path) -> None:
    changes = Changes(tmp_path, [row(3, "before")], [insert(row(7, "new"))])
    _adds_column(changes)
    changes.by_files(definition("k"))
    assert changes.lake.delta_rs is not None
    compact(changes.lake.delta_rs, changes.path)
    assert _mine(changes) == {(*row(3, "before").values(), "kept"), (*row(7, "new").values(), None)}


@pytest.mark.parametrize("alter", [_constrains, _partitions])
def test_inserts_into_a_table_with_more_writer_features_are_not_written_as_files(
    tmp_path: Path, alter: Callable[[Changes], None]
) -> None:
    changes = Changes(tmp_path, [row(3, "before")], [insert(row(7, "new"))])
    alter(changes)
    assert find_many_changes(changes.lake, changes.path, changes.log, definition(), changes.pending()) is None
    local, kept = changes.lake.delta_rs, row(3, "before")
    assert local is not None
    keys = pa.table({"t": pa.array([kept["t"], "t9"]), "k": pa.array([kept["k"], 3])})
    assert local.find_rows(changes.path, keys, keys.schema)[1].to_pylist() == [
        {"t": kept["t"], "k": kept["k"]}
    ]
