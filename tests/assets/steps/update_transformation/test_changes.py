"""One thread or several decode, filter and write the changes, with the same result; so does Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA
from pgsieve.assets.steps.update_transformation.changes import (
    SentChanges,
    TableSlice,
    TruncateOrder,
    WrittenChanges,
    count_stored_changes,
)
from pgsieve.assets.steps.update_transformation.messages import (
    FewMessages,
    MessageFilter,
    Messages,
    SparkMessages,
    StoredMessages,
    StoredSelection,
    count_changes,
    read_commit_lsns,
)
from pgsieve.assets.steps.update_transformation.relation_versions import Reading
from pgsieve.decoding.changes.columns import ENCODED_COLUMNS, ROW_OPERATIONS, changes_schema
from pgsieve.decoding.changes.decode import FilterColumns
from pgsieve.decoding.changes.sent_as import ChangeKind
from pgsieve.decoding.changes.tally import ChangeCounts
from pgsieve.decoding.changes.transform import (
    EncodedMessages,
    Filters,
    Transformation,
    add_slice,
    truncate_changes,
)
from pgsieve.decoding.errors import ValueNotRepresentableError
from pgsieve.decoding.protocol.messages import Delete, Insert, Message, Update, encode
from pgsieve.decoding.protocol.tuple_data import Null, OldKey, Text
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.row_filters.analysis import FilterColumn, parse_row_filter
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.values.types import column_type
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD, ThreadRunner
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import SparkRows, SparkSource
from pgsieve.resources.lake.stores.batch_cache import BatchCache, get_batch_cache, share_batch_cache
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.pgsieve_replica import engine

_INT, _TEXT = 23, 25


def row_filter(text: str) -> RowFilter:
    return parse_row_filter(text, {"a": FilterColumn("a", _INT, -1, "")}, "t")


_ROWS, _GROUP, _END = 90, 8, 500
_AT = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = RelationColumns(("a", "b"), (column_type(_INT, -1), column_type(_TEXT, -1)))
_SCHEMA = changes_schema(zip(COLUMNS.names, (t.arrow_type for t in COLUMNS.types), strict=True))

#: Row filters for all operations: none, filters that are evaluated column by column, and filters that are evaluated row by row.
FILTERS: dict[str, Filters] = {
    text: dict.fromkeys(ROW_OPERATIONS, [row_filter(text)] if text else None)
    for text in ("", "a % 2 = 1", "a + 1 > 40 OR a < 20", "a < 0", "false", "true")
}


OF_ONE = MessageFilter(relations=frozenset({1}))


def transformation(text: str, operations: Collection[str] = ROW_OPERATIONS) -> Transformation:
    filters = FILTERS[text]
    names = {name for each in filters.values() for one in each or () for name in one.columns}
    read = FilterColumns(frozenset(names), COLUMNS) if text else None
    return Transformation(COLUMNS, _SCHEMA, ("a",), frozenset(operations), filters, filter_columns=read)


def sent_changes(
    messages: Messages,
    *transformations: Transformation,
    truncates: Sequence[TruncateOrder] = (),
    choice: MessageFilter = OF_ONE,
) -> SentChanges:
    of_slice = TableSlice(_END, transformations[0].key, transformations[0].schema)
    return SentChanges(messages, [Reading(choice, each) for each in transformations], truncates, of_slice)


def message(number: int) -> Message:
    key = Text(str(number).encode())
    match number % 3:
        case 0:
            return Insert(number % 2, (key, Text(b"new")))
        case 1:
            return Update(number % 2, None, (key, Text(b"newer")))
        case _:
            return Delete(number % 2, OldKey((key, Null())))


def change_log(folder: Path, messages: list[Message]) -> tuple[pa.Table, StoredMessages]:
    """A change log of two slices in two files, and the messages of the second slice."""
    rows = pa.Table.from_pylist(
        [
            {
                "slice": _END if number >= 10 else _END - 100,
                "commit_lsn": 10 * number,
                "ordinal": 2,
                "number": number,
                "commit_time": 0,
                "kind": encode(message)[:1].decode(),
                "relation_id": number % 2,
                "data": encode(message),
            }
            for number, message in enumerate(messages)
        ],
        CHANGE_LOG_SCHEMA,
    )
    half = len(messages) // 2
    files = [str(folder / name) for name in ("one.parquet", "other.parquet")]
    for file, part in zip(files, (rows.slice(0, half), rows.slice(half)), strict=True):
        pq.write_table(part, file, row_group_size=_GROUP)
    store = Store()
    groups = [group for file in files for group in store.list_row_groups(file)]
    return rows.slice(10), StoredMessages(groups, StoredSelection(store, frozenset([_END])))


@pytest.fixture
def messages(tmp_path: Path) -> tuple[pa.Table, StoredMessages]:
    return change_log(tmp_path, [message(number) for number in range(_ROWS)])


def test_the_messages_of_a_choice_are_read_from_their_row_groups(
    messages: tuple[pa.Table, StoredMessages],
) -> None:
    table, stored = messages
    few, many = FewMessages(table), stored
    for choice in (
        MessageFilter(relations=frozenset({1})),
        MessageFilter(after_order=(200, 2)),
        MessageFilter(before_order=(700, 2)),
        MessageFilter(excluded_lsn=330),
    ):
        few, many = few.apply_filter(choice), many.apply_filter(choice)
        assert read_commit_lsns(many) == read_commit_lsns(few)
        assert count_changes(many) == count_changes(few)
        batches = list(many.selection.batches(many.groups, few.table.column_names))
        assert pa.Table.from_batches([b.messages for b in batches]) == few.table.combine_chunks()
    assert len(batches) < len(stored.groups)


@pytest.mark.parametrize("texts", FILTERS)
@pytest.mark.parametrize("operations", [frozenset(ROW_OPERATIONS), frozenset(["insert", "update"])])
def test_every_runner_writes_the_same_changes(
    tmp_path: Path, messages: tuple[pa.Table, StoredMessages], texts: str, operations: frozenset[str]
) -> None:
    table, stored = messages
    chosen, few = transformation(texts, operations), FewMessages(table)
    counts = Counter[ChangeKind]()
    encoded = map(EncodedMessages, few.apply_filter(OF_ONE).table.select(ENCODED_COLUMNS).to_batches())
    made = [*chosen.transform(encoded, counts), truncate_changes([(405, 3, _AT)], _SCHEMA)]
    expected = pa.Table.from_batches([add_slice(batch, _END, _SCHEMA) for batch in made], _SCHEMA)
    for name, several, runner in (
        ("few", few, CALLING_THREAD),
        ("many", stored, ThreadRunner(2)),
        ("one", stored, CALLING_THREAD),
    ):
        changes, folder = sent_changes(several, chosen, truncates=[(405, 3, _AT)]), tmp_path / name
        written = changes.write_files(runner, str(folder), Store())
        files = written.files.to_pylist()
        rows = pa.concat_tables(pq.read_table(folder / file["path"]) for file in files)
        assert rows.sort_by("commit_lsn").to_pylist() == expected.sort_by("commit_lsn").to_pylist()
        sent = written.counts.sent
        for operation in (*ROW_OPERATIONS, "truncate"):
            assert sent.get(operation, 0) == expected["operation"].to_pylist().count(operation)
        assert written.counts.sent_as == counts
        assert sum(n for each, n in counts.items() if each.sent_as) == sum(
            sent.get(operation, 0) for operation in ROW_OPERATIONS
        )
        assert name != "few" or len(files) == 1
        assert changes.count_without_writing(runner).sent_as == counts


@pytest.mark.spark
def test_spark_makes_and_counts_the_same_changes(
    tmp_path: Path, messages: tuple[pa.Table, StoredMessages]
) -> None:
    session, (table, stored) = engine().session, messages
    # Commit times are times in Spark; in these messages they are 0.
    lake = Lake(tmp_path.as_uri(), lambda: session)
    columns = [(name, kind.spark_type) for name, kind in zip(COLUMNS.names, COLUMNS.types, strict=True)]
    frame = session.createDataFrame(table).repartition(3)
    places = [(405, 3, _AT), (407, 1, _AT)]
    for number, text in enumerate(["", "a + 1 > 40 OR a < 20", "a < 0"]):
        chosen = [transformation(text), transformation(text, {"insert", "delete"})]
        changes = sent_changes(stored, *chosen, truncates=places)
        expected = changes.write_files(CALLING_THREAD, str(tmp_path / f"{number}"), Store())
        rows = read_files(tmp_path / f"{number}", expected)
        by = [(name, "ascending") for name in ("commit_lsn", "ordinal", "operation")]
        for read in (replace(changes, messages=SparkMessages(frame)), changes):
            made, got = read.make_rows(lake, columns, ThreadRunner(2)), list[pa.Table]()
            written = made.write(lambda frame, into=got: into.append(frame.toArrow()))
            assert written is not None
            assert got[0].sort_by(by).to_pylist() == rows.sort_by(by).to_pylist()
            folder = tmp_path / f"{number} {type(read.messages).__name__}"
            in_files = read.write_files(CALLING_THREAD, str(folder), Store())
            assert read_files(folder, in_files).sort_by(by) == rows.sort_by(by)
            for counts in (ChangeCounts.sum(written), ChangeCounts.sum(made.notes()), in_files.counts):
                assert counts.sent_as == expected.counts.sent_as
                assert {**counts.sent, "bytes": 0} == {**expected.counts.sent, "bytes": 0}
            assert read.count_without_writing(CALLING_THREAD).sent_as == expected.counts.sent_as
        assert {
            "bytes": 0,
            **count_stored_changes(SparkSource([SparkRows(session.createDataFrame(rows), iter)]), ["a"]),
        } == {
            **expected.counts.sent,
            "bytes": 0,
        }


def read_files(folder: Path, written: WrittenChanges) -> pa.Table:
    return pa.concat_tables(pq.read_table(folder / file) for file in written.files["path"].to_pylist())


def test_a_shared_reading_gives_each_subscription_the_same_as_its_own(
    tmp_path: Path, messages: tuple[pa.Table, StoredMessages]
) -> None:
    choices = [
        MessageFilter(relations=frozenset({1})),
        MessageFilter(relations=frozenset({1}), after_order=(200, 2)),
        MessageFilter(relations=frozenset({0})),
    ]
    other_types = RelationColumns(COLUMNS.names, (COLUMNS.types[1], COLUMNS.types[1]))
    as_text = parse_row_filter("a > '5'", {"a": FilterColumn("a", _TEXT, -1, "C")}, "t")
    of_text: Filters = {operation: [as_text] for operation in ROW_OPERATIONS}

    def rows(stored: StoredMessages, name: str) -> list[list[dict[str, Any]]]:
        each = []
        for number, (choice, text) in enumerate(product(choices, FILTERS)):
            transformations = [transformation(text)]
            if text:  # the same messages and column, read as another type
                read = FilterColumns(frozenset("a"), other_types)
                transformations.append(replace(transformations[0], filters=of_text, filter_columns=read))
            folder = tmp_path / name / str(number)
            changes = sent_changes(stored, *transformations, choice=choice)
            files = changes.write_files(ThreadRunner(2), str(folder), Store()).files.to_pylist()
            tables = [pq.read_table(folder / file["path"]) for file in files]
            each.append(sorted((row for table in tables for row in table.to_pylist()), key=str))
        return each

    def cached(cache: BatchCache) -> StoredMessages:
        return replace(stored, selection=replace(stored.selection, batch_cache=cache))

    stored = messages[1]
    alone = rows(stored, "alone")
    with share_batch_cache():
        kept = cached(get_batch_cache())
        assert rows(kept, "shared") == alone
    assert rows(cached(BatchCache(2000)), "some") == alone


def test_no_file_is_written_if_all_changes_are_filtered_out(
    tmp_path: Path, messages: tuple[pa.Table, StoredMessages]
) -> None:
    folder = tmp_path / "changes"
    written = sent_changes(messages[1], transformation("a < 0")).write_files(
        ThreadRunner(2), str(folder), Store()
    )
    assert written.files.num_rows == 0
    assert sum(written.counts.sent_as.values()) == (_ROWS - 10) // 2
    assert not folder.exists()


def test_truncates_without_messages_are_changes(
    tmp_path: Path, messages: tuple[pa.Table, StoredMessages]
) -> None:
    for each in (FewMessages(messages[0]), messages[1]):
        changes = replace(sent_changes(each, transformation(""), truncates=[(405, 3, _AT)]), readings=())
        assert changes.count_without_writing(CALLING_THREAD).sent_as == {}
        written = changes.write_files(CALLING_THREAD, str(tmp_path), Store())
        assert read_files(tmp_path, written)["operation"].to_pylist() == ["truncate"]


def test_a_decoding_error_is_raised_unchanged(tmp_path: Path) -> None:
    _, stored = change_log(
        tmp_path, [*map(message, range(50)), Insert(1, (Text(b"1"), Text(b"x"))), Insert(0, (Null(), Null()))]
    )
    text_as_int = RelationColumns(("b", "a"), (COLUMNS.types[1], COLUMNS.types[0]))
    schema = changes_schema(zip(text_as_int.names, (t.arrow_type for t in text_as_int.types), strict=True))
    made = Transformation(text_as_int, schema, ("b",), frozenset(ROW_OPERATIONS), FILTERS[""])
    with pytest.raises(ValueNotRepresentableError, match="column"):
        sent_changes(stored, made).count_without_writing(ThreadRunner(2))


@pytest.mark.parametrize("key", ["infinity", "0044-03-15 BC"])
def test_a_value_that_does_not_fit_is_reported_with_a_key_beyond_pythons_range(
    tmp_path: Path, key: str
) -> None:
    columns = RelationColumns(("k", "n"), (column_type(1082, -1), column_type(_INT, -1)))
    schema = changes_schema(zip(columns.names, (t.arrow_type for t in columns.types), strict=True))
    change = Insert(0, (Text(key.encode()), Text(b"NaN")))
    _, stored = change_log(tmp_path, [change] * 12)
    made = Transformation(columns, schema, ["k"], frozenset(ROW_OPERATIONS), dict.fromkeys(ROW_OPERATIONS))
    with pytest.raises(ValueNotRepresentableError, match=rf"in the row with key \(k\)=\({key}\)"):
        sent_changes(stored, made, choice=MessageFilter()).count_without_writing(ThreadRunner(2))
