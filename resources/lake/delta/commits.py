"""Commits to Delta tables by delta-rs. A commit is atomic, and is made only once per position.

In: rows, files or a net change (at most one row per key); and the version of the table from which they were planned.
Out: one commit. It stores the position (the LSN up to which the table then has all changes) in Delta's `txn` action.

If another writer was faster, the commit is repeated. If a repeated commit would need a new plan, OvertakenError is
raised. Also raises CommitFailedError and other errors of delta-rs.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Transaction Identifiers)
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
from deltalake import (
    CommitProperties,
    DeltaTable,
    Field,
    Schema,
    TableFeatures,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from pgsieve.resources.lake.delta import requirements
from pgsieve.resources.lake.delta.bounds import make_writer_properties, write_with_bounds
from pgsieve.resources.lake.delta.errors import OvertakenError, retry_commit
from pgsieve.resources.lake.delta.layout import find_target_file_bytes
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.queries import quote_column
from pgsieve.resources.lake.delta.records import (
    APPLICATION_ID,
    VERSION_APPLICATION_ID,
    Commit,
    TableHead,
    add_version_column,
    commit_metadata,
    make_unchanged_position_metadata,
)
from pgsieve.resources.lake.delta.tables import Tables, make_arrow_schema, share_tables
from pgsieve.resources.lake.stores.store import Store

#: The key of the comment in the metadata of a column. Spark uses the same key.
COMMENT_KEY = "comment"
#: Metadata that marks a column, and has no other meaning. If only the order of the columns changes, delta-rs keeps the
#: former order. The mark makes the columns differ in something else, too (`_prepare_schema`).
_ORDER_MARK = "pgsieve.reordered"
#: The characters that delta-rs does not encode in a path of the log, besides letters and digits.
_UNENCODED_CHARACTERS = "!$&'()+,-./:;=@_~"


class Commits:
    """Commits to Delta tables that delta-rs can reach."""

    def __init__(self, store: Store | None = None, tables: Tables | None = None) -> None:
        self.store = store or Store()
        self._tables = tables or share_tables(self.store.options)

    def exists(self, path: str) -> bool:
        """True if a Delta table exists."""
        return self._tables.exists(path)

    def open_table(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        return self._tables.open(path)

    def open_version(self, path: str, version: int) -> DeltaTable:
        """A table at one of its versions. It does not change when the table gets a new version."""
        return self._tables.open_version(path, version)

    def append(
        self,
        path: str,
        rows: pa.Table,
        position: int | None = None,
        *,
        expected_version: int | None = None,
        expected_position: int | None = None,
    ) -> None:
        """Append rows in one commit. With a position, the rows are appended only once per position."""
        self.write(
            path,
            rows,
            Commit(position, expected_version=expected_version, expected_position=expected_position),
        )

    def append_versioned(self, path: str, rows: pa.Table, expected_version: int | None = None) -> None:
        """Append rows, with the Delta version of their commit in a column.

        Raises OvertakenError if the table is not at `expected_version`. Raises CommitFailedError if another writer was
        faster.
        """
        table = self.open_if_exists(path) or self._create(path, add_version_column(rows, 0).schema)
        version = table.version() + 1
        if expected_version not in {None, table.version()}:
            raise OvertakenError(path)
        versioned_rows = add_version_column(rows, version)
        write_deltalake(
            table,
            versioned_rows,
            schema_mode="merge",
            mode="append",
            writer_properties=make_writer_properties(versioned_rows.schema),
            commit_properties=CommitProperties(
                custom_metadata={"userMetadata": commit_metadata(None)},
                max_commit_retries=0,
                app_transactions=[Transaction(VERSION_APPLICATION_ID, version)],
            ),
        )

    def write(self, path: str, rows: pa.Table | pa.RecordBatchReader, commit: Commit) -> None:
        """Append rows to a table, or overwrite the table with them, in one commit.

        If another writer was faster, the commit is repeated. But a RecordBatchReader can be read only once, so for
        such rows CommitFailedError is raised instead. OvertakenError is raised if an overwrite would lower the
        position, or if the table is not at the version or position that `commit` expects.
        """
        overwrite = commit.overwrite

        def attempt(table: DeltaTable | None) -> None:
            if has_position(path, self.read_head(path, table), commit):
                return

            if table is None:
                self._tables.expect_creation(path)

            def write_once(properties: WriterProperties) -> None:
                write_deltalake(
                    path if table is None else table,
                    rows,
                    mode="error" if table is None else "overwrite" if overwrite else "append",
                    schema_mode=("overwrite" if overwrite else "merge") if table else None,
                    configuration=None if table else commit.properties,
                    storage_options=self._tables.options if table is None else None,
                    target_file_size=find_target_file_bytes(_find_table_properties(table, commit.properties)),
                    writer_properties=properties,
                    commit_properties=_make_commit_properties(commit, must_follow_opened=table is None),
                )

            if isinstance(rows, pa.Table):
                write_with_bounds(write_once, rows.schema, rows)
            else:
                write_once(make_writer_properties(rows.schema))

        self.commit_with_retries(path, attempt, commit, is_single_attempt=not isinstance(rows, pa.Table))

    def commit(
        self,
        path: str,
        schema: pa.Schema,
        files: Iterable[Mapping[str, Any]],
        commit: Commit,
        removed_size_by_path: Mapping[str, int] | None = None,
    ) -> None:
        """Commit files that `parquet_files` has written. The table gets all of them in one commit.

        A table that does not exist is created first. An overwrite gives the table the columns of `schema`.

        If another writer was faster, the commit is repeated. `removed_size_by_path` has the files to remove: it maps their
        paths in the log to their sizes, at the version from which the commit was planned.
        """
        now_ms = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(file["path"], file["size"], {}, now_ms, True, file["stats"]) for file in files
        ]
        actions += [
            make_removal(name, size, now_ms, changes=True)
            for name, size in (removed_size_by_path or {}).items()
        ]

        def attempt(table: DeltaTable | None) -> None:
            if has_position(path, self.read_head(path, table), commit):
                return
            if table is None:
                self._tables.expect_creation(path)
                table = DeltaTable.create(
                    path,
                    Schema.from_arrow(schema),
                    configuration=commit.properties,
                    storage_options=self._tables.options,
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
                # Another writer may have committed after the table was created and before it was opened.
                if table.version():
                    raise CommitFailedError(f"{path} has been written to")
            table.create_write_transaction(
                actions,
                "overwrite" if commit.overwrite else "append",
                _prepare_schema(table, schema) if commit.overwrite else table.schema(),
                commit_properties=_make_commit_properties(commit),
            )

        self.commit_with_retries(path, attempt, commit)

    def commit_with_retries(
        self,
        path: str,
        attempt: Callable[[DeltaTable | None], None],
        commit: Commit,
        *,
        is_single_attempt: bool = False,
    ) -> None:
        """Call `attempt` with the newest version of the table. If another writer was faster, call it again.

        It is not called again if the commit has an `expected_version`, or with `is_single_attempt`.
        """
        expected_version, position = commit.expected_version, commit.position

        def commit_once() -> None:
            table = self.open_if_exists(path)
            head = self.read_head(path, table)
            # If another writer commits after this check, this commit fails.
            commit.raise_if_overtaken(path, head)
            try:
                attempt(table)
                # Cache the position only if the table has exactly the next version. With a later version, other writers
                # have committed, too.
                if table is not None and position is not None and table.version() == head.version + 1:
                    self._tables.cache_rows(path, table, "position", [{"position": position}])
            except DeltaError as error:
                # The newer version may be this commit itself, if only a step after it has failed. The caller's new plan
                # notices that.
                if expected_version is not None and self.head(path).version != expected_version:
                    raise OvertakenError(path) from error
                if table is None and not isinstance(error, CommitFailedError) and self.exists(path):
                    raise CommitFailedError(str(error)) from error
                raise

        if is_single_attempt or expected_version is not None:
            commit_once()
        else:
            retry_commit(commit_once)()

    def merge(
        self,
        path: str,
        source: pa.Table,
        merge: Merge,
        commit: Commit,
    ) -> None:
        """Merge a net change into a table that has a key, in one commit.

        Unlike `write`, this does not look whether the table already has the position of `commit`. So `commit` must have
        an `expected_version`: OvertakenError is raised if the change was merged before.
        """
        clauses = merge.make_clauses(quote_column)

        def attempt(table: DeltaTable | None) -> None:
            assert table is not None
            target = table

            def merge_once(properties: WriterProperties) -> Mapping[str, Any]:
                merger = target.merge(
                    source,
                    clauses.match_condition,
                    source_alias="s",
                    target_alias="t",
                    writer_properties=properties,
                    commit_properties=_make_commit_properties(commit),
                )
                merger = merger.when_matched_delete(clauses.delete_condition)
                if clauses.end_values:
                    merger = merger.when_matched_update(dict(clauses.end_values), clauses.end_condition)
                result: Mapping[str, Any] = (
                    merger.when_matched_update(dict(clauses.update_values))
                    .when_not_matched_insert(dict(clauses.insert_values), clauses.insert_condition)
                    .execute()
                )
                return result

            write_with_bounds(merge_once, make_arrow_schema(target), source)

        self.commit_with_retries(path, attempt, commit)

    def find_missing_comments(
        self, path: str, description: str | None, columns: Mapping[str, str]
    ) -> tuple[str | None, dict[str, str]]:
        """Find which of these descriptions a table and its columns lack.

        The first result is None if the table has `description`. The second maps columns to their missing descriptions.
        """
        table = self.open_table(path)
        comments = {
            field.name: (field.metadata or {}).get(COMMENT_KEY, "") for field in table.schema().fields
        }
        missing_column_comments = {
            name: columns.get(name, "")
            for name, comment in comments.items()
            if columns.get(name, "") != comment
        }
        new_description = description or ""
        has_description = (table.metadata().description or "") == new_description
        return None if has_description else new_description, missing_column_comments

    def set_comments(self, path: str, description: str | None, columns: Mapping[str, str]) -> None:
        """Set the descriptions of a table and of some of its columns. Its rows and its position stay as they are."""
        table = self.open_table(path)
        user_metadata = {"userMetadata": make_unchanged_position_metadata(self.position(path))}
        properties = CommitProperties(custom_metadata=user_metadata)
        if description is not None:
            table.alter.set_table_description(description, commit_properties=properties)
        for field in table.schema().fields:
            if field.name in columns:
                # Keep the other metadata. With column mapping, they include the number of the column, and its name in
                # files.
                metadata = {**(field.metadata or {}), COMMENT_KEY: columns[field.name]}
                table.alter.set_column_metadata(field.name, metadata, commit_properties=properties)

    def properties(self, path: str) -> Mapping[str, str]:
        """The Delta properties of a table. Empty if the table does not exist."""
        return _find_table_properties(self.open_if_exists(path), None)

    def set_properties(self, path: str, properties: Mapping[str, str]) -> None:
        """Set Delta properties of a table. Its rows and its position stay as they are."""
        user_metadata = {"userMetadata": make_unchanged_position_metadata(self.position(path))}
        self.open_table(path).alter.set_table_properties(
            dict(properties),
            raise_if_not_exists=False,
            commit_properties=CommitProperties(custom_metadata=user_metadata),
        )

    def drop_constraints(self, path: str, names: Iterable[str]) -> None:
        """Drop CHECK constraints of a table. Its rows and its position stay as they are."""
        user_metadata = {"userMetadata": make_unchanged_position_metadata(self.position(path))}
        for name in names:
            self.open_table(path).alter.drop_constraint(
                name, commit_properties=CommitProperties(custom_metadata=user_metadata)
            )

    def position(self, path: str) -> int | None:
        """The position of pgsieve's newest commit to a table."""
        return self.head(path).position

    def head(self, path: str) -> TableHead:
        """The newest version of a table and its position, both read at the same moment."""
        return self.read_head(path, self.open_if_exists(path))

    def read_head(self, path: str, table: DeltaTable | None) -> TableHead:
        """The same as `head`, for a table that is open. None stands for a table that does not exist."""
        if table is None:
            return TableHead()
        # The position is cached, because delta-rs reads the whole log to find it.
        (row,) = self._tables.cached_rows(
            path, table, "position", lambda: [{"position": table.transaction_version(APPLICATION_ID)}]
        )
        return TableHead(table.version(), row["position"])

    def open_if_exists(self, path: str) -> DeltaTable | None:
        """The newest version of a table. None if the table does not exist."""
        return self._tables.open_if_exists(path)

    def _create(self, path: str, schema: pa.Schema) -> DeltaTable:
        """Create a table without rows."""
        self._tables.expect_creation(path)
        try:
            return DeltaTable.create(path, Schema.from_arrow(schema), storage_options=self._tables.options)
        except DeltaError:
            if (table := self.open_if_exists(path)) is None:
                raise
            return table  # Another writer has created it.


def make_writable(rows: pa.Table) -> pa.Table:
    """Rows that Spark has made, in a form that delta-rs can write.

    All columns and fields become nullable. Otherwise Delta would enforce NOT NULL even after PostgreSQL has
    dropped it. All buffers are copied, because Spark leaves out the offsets of empty lists, and delta-rs reads
    them.
    """
    nullable_rows = rows.cast(pa.schema([_make_nullable(field) for field in rows.schema]))
    return nullable_rows.take(pa.array(range(nullable_rows.num_rows), pa.int64()))


def _find_table_properties(
    table: DeltaTable | None, properties: Mapping[str, str] | None
) -> Mapping[str, str]:
    """The Delta properties of a table. If there is no table yet, the properties of the new table."""
    if table is None:
        return properties or {}
    configuration: dict[str, str] = table.metadata().configuration
    return configuration


def is_removable(path: str) -> bool:
    """True if `make_removal` writes the path of a file as the log has it. Other writers may encode other characters."""
    return quote(unquote(path), safe=_UNENCODED_CHARACTERS) == path


def make_removal(path: str, size: int, time_ms: int, *, changes: bool) -> RemoveAction:
    """The action that removes a file from a table. `path` is the path of the file in the log.

    `changes` says whether the removal changes the rows of the table. The path is decoded here, because delta-rs encodes it again.
    If a path were encoded twice, it would match no file, and the rows would stay.
    """
    return RemoveAction(unquote(path), changes, time_ms, size, {})


def _make_nullable(field: pa.Field) -> pa.Field:
    """The same field, but nullable, with all fields in it nullable, too."""
    data_type = field.type
    if pa.types.is_struct(data_type):
        data_type = pa.struct([_make_nullable(inner) for inner in data_type])
    elif pa.types.is_list(data_type):
        data_type = pa.list_(_make_nullable(data_type.value_field))
    return pa.field(field.name, data_type, nullable=True)


def has_position(path: str, head: TableHead, commit: Commit) -> bool:
    """True if a table with this head (version and position) already has the position of a commit.

    Raises OvertakenError if an overwrite would lower the position. The commit must directly follow this head; otherwise
    two writers could both commit the same position.
    """
    if head.position is None or commit.position is None:
        return False
    if commit.overwrite and head.position > commit.position:
        raise OvertakenError(path)
    return head.position >= commit.position


def _prepare_schema(table: DeltaTable, schema: pa.Schema) -> Schema:
    """The columns that an overwrite gives a table. If they are the same as before, they keep their metadata.

    delta-rs does not add the feature that a first timestamp without a time zone requires. It is added here, by a commit
    that changes nothing else. If only the order of the columns differs, delta-rs would keep the old order. So in this
    case `_ORDER_MARK` is added, or removed if the table has it.
    """
    if requirements.has_same_columns(table, schema):
        return table.schema()
    if requirements.lacks_local_timestamps(table, schema):
        position = table.transaction_version(APPLICATION_ID)
        table.alter.add_feature(
            TableFeatures.TimestampWithoutTimezone,
            allow_protocol_versions_increase=True,
            commit_properties=CommitProperties(
                custom_metadata={"userMetadata": make_unchanged_position_metadata(position)}
            ),
        )
    new_schema = Schema.from_arrow(schema)
    if requirements.has_permuted_columns(table, schema) and not any(
        _ORDER_MARK in (field.metadata or {}) for field in table.schema().fields
    ):
        first_field, *other_fields = new_schema.fields
        metadata = {**(first_field.metadata or {}), _ORDER_MARK: "true"}
        marked_field = Field(
            first_field.name, first_field.type, nullable=first_field.nullable, metadata=metadata
        )
        return Schema([marked_field, *other_fields])
    return new_schema


def _make_commit_properties(commit: Commit, *, must_follow_opened: bool = False) -> CommitProperties:
    """The properties of a commit. They say whether delta-rs may repeat the commit after commits of other writers.

    With `must_follow_opened` the commit must directly follow the version that was opened. The same holds for an overwrite,
    and for a commit with a position or with an `expected_version`. Otherwise delta-rs would repeat commits that must
    fail. An example is an overwrite after another writer's compaction: it would not remove the compacted file. Another is
    the first commit of a table after another writer's first commit, which is no conflict by Delta's rules.
    """
    position = commit.position
    must_follow = (
        must_follow_opened or commit.overwrite or commit.expected_version is not None or position is not None
    )
    return CommitProperties(
        custom_metadata={"userMetadata": commit.user_metadata},
        max_commit_retries=0 if must_follow else None,
        app_transactions=None if position is None else [Transaction(APPLICATION_ID, position)],
    )
