"""Subscriber consistency: checks that a replica equals the publisher's filtered table at the same LSN.

A snapshot of the publisher is exported at some LSN, and the subscription is brought up to exactly that LSN. Then the
rows that the publisher selects in the snapshot are compared with those of the replica
(`pgsieve.assets.steps.checks.comparison`). Other sessions can go on writing to the publisher meanwhile. The result has
the keys of rows that differ, and no other values.
"""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.checks.comparison import CHECKSUM_SESSIONS, Difference, TableSides, has_same_hashes
from pgsieve.assets.steps.checks.difference import SideCounts
from pgsieve.assets.steps.initial_sync.one_table import make_select_list
from pgsieve.assets.steps.initial_sync.rows import ReplicaColumn
from pgsieve.assets.steps.log import Log, no_log
from pgsieve.assets.steps.records.failures import describe_error, is_foreign_server_error, is_lock_error
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    TableStates,
    add_copy_command,
)
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.assets.steps.validation.examination import find_locked_tables
from pgsieve.assets.steps.validation.warnings import find_unsent_leaves
from pgsieve.decoding.checksums.record_send import SentColumn
from pgsieve.decoding.checksums.segments import RowHash
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.resources.lake.delta.errors import LakeError, OvertakenError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.errors import translate_errors
from pgsieve.resources.postgres.foreign_servers import verify_foreign_servers
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import (
    Chunks,
    Snapshot,
    build_chunk_queries,
    export_snapshot,
    find_tables_with_hidden_rows,
)
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.waits import PATIENT_SECONDS
from pgsieve.resources.work import name_jobs


@dataclass(frozen=True)
class TableConsistency:
    """The comparison of one table at `lsn`.

    - `publisher_rows`, `replica_rows`: the numbers of rows
    - `counts`: how many rows differ
    - `keys`: the keys of some of these rows, as text
    - `problem`: the reason why the table could not be compared
    """

    schema: str
    table: str
    lsn: int
    publisher_rows: int = 0
    replica_rows: int = 0
    counts: SideCounts = SideCounts()  # noqa: RUF009 - it is immutable
    keys: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def differing(self) -> int:
        """How many rows differ, on both sides together."""
        return self.counts.total

    @property
    def equal(self) -> bool:
        """True if the replica has exactly the publisher's rows."""
        return self.problem is None and self.differing == 0


#: A table that is altered during its comparison is compared at most this many times.
MAX_ATTEMPTS = 3
ALTERED_PROBLEM = "its columns changed on the publisher; run again to copy it"
HIDDEN_PROBLEM = (
    "row-level security hides some of its rows from the source's role, but replication sends these rows too: to compare it,"
    " give the role BYPASSRLS, or a policy that lets every row pass"
)
REWRITTEN_PROBLEM = "it was rewritten, by TRUNCATE or ALTER TABLE, while its rows were read; check it again"

TableNames = Collection[Name] | None
#: A function that gets the result of an `apply`. The replicas that it has changed can then be reported to Dagster.
OnApplied = Callable[[ApplyResult], None]


def ignore_applied(_: ApplyResult) -> None:
    """Do nothing about the result of an `apply`."""


@dataclass(frozen=True)
class SubscriptionAtLsn:
    """A subscription and its publisher at the LSN of an exported snapshot.

    - `table_by_name`: the subscription's tables, with their definitions in `catalog`
    - `state_by_table`: the states of these tables
    - `seed`: the seed of the hashes of rows; None if pgsieve cannot compute the server's hashes
    - `oids_with_hidden_rows`: the oids of tables with rows that row-level security hides from the role
    - `applied`: what was applied to reach the LSN
    """

    subscription: Subscription
    lake: Lake
    connection: psycopg.Connection[Any]
    conninfo: Conninfo
    catalog: Catalog
    table_by_name: dict[Name, ReplicatedTable]
    state_by_table: dict[Name, TableState]
    snapshot: Snapshot
    seed: int | None
    oids_with_hidden_rows: Collection[int]
    applied: ApplyResult

    def find_problem(self, name: Name) -> str | None:
        """Find the reason why a table cannot be compared; None if it can."""
        if name not in self.table_by_name:
            return SyncState.REMOVED.meaning
        if self.table_by_name[name].table.oid in self.oids_with_hidden_rows:
            return HIDDEN_PROBLEM
        state = self.state_by_table.get(name)
        if state is None or state.state != SyncState.READY:
            reason = "not copied yet" if state is None else state.state.meaning
            return reason + (f": {state.reason}" if state and state.reason else "")
        if (
            lock_error_by_table := dict(
                find_locked_tables(self.subscription.slot_stream, self.subscription.name, self.catalog)
            )
        ).get(name):
            return lock_error_by_table[name].message
        type_by_column = self.subscription.column_types(self.table_by_name[name])
        replica_columns = tuple(
            (self.subscription.replica_name(column_name), column_type.spark_type)
            for column_name, column_type in type_by_column.items()
        )
        if state.definition is None or state.definition.table_columns != replica_columns:
            return ALTERED_PROBLEM
        return None

    def find_rewritten_tables(self, names: Collection[Name]) -> list[Name]:
        """Find the tables that were rewritten after the export of the snapshot. The snapshot may show them as empty."""
        if not names:
            return []
        later_catalog = read_catalog(self.connection)
        return [
            name
            for name in names
            if Layout.from_table(self.table_by_name[name].table, self.catalog).is_rewritten_in(later_catalog)
        ]

    @contextmanager
    def translate_errors(self, name: Name, activity: str) -> Iterator[None]:
        """In the `with` block, add the name of the table to errors of the publisher and of the lake."""
        table_name = self.table_by_name[name].table.qualified_name
        with (
            self.lake.access.translate_errors(table_name),
            translate_errors(self.subscription.slot_stream.source.name, f'{activity} table "{table_name}"'),
        ):
            yield

    def make_sides(self, name: Name) -> TableSides:
        """Make the two sides of a table's comparison: the publisher's rows and the replica's rows.

        Raises OvertakenError if the replica has changes from after the snapshot.
        """
        replicated_table, definition = self.table_by_name[name], self.state_by_table[name].definition
        assert definition is not None
        type_by_column = self.subscription.column_types(replicated_table)
        type_oid_by_column = {a.name: a.type_oid for a in replicated_table.table.attributes}
        sent_columns = tuple(
            SentColumn.for_column(quote(column_name), type_oid_by_column[column_name], column_type)
            for column_name, column_type in type_by_column.items()
        )
        path = self.lake.paths.replica(self.subscription.name, *name)
        head = self.lake.records.head(path)
        if (head.position or 0) > self.snapshot.lsn:
            raise OvertakenError(path)

        def count_parts(size: int) -> int:
            # If this process does the comparison, without Spark, it queries the publisher in CHECKSUM_SESSIONS
            # sessions.
            policy = self.lake.policy
            return policy.count_parallel_parts(size) if policy.is_read_by_spark(path) else CHECKSUM_SESSIONS

        def make_chunks(expressions: Sequence[str]) -> Chunks:
            return build_chunk_queries(
                self.connection, replicated_table, expressions, self.catalog, count_parts
            )

        return TableSides(
            lake=self.lake,
            path=path,
            version=head.version,
            columns=[
                ReplicaColumn(
                    self.subscription.replica_name(column_name),
                    column_type,
                    column_name in replicated_table.key,
                )
                for column_name, column_type in type_by_column.items()
            ],
            conninfo=self.conninfo,
            snapshot=self.snapshot,
            make_chunks=make_chunks,
            select_list=make_select_list(self.subscription, replicated_table),
            row_hash=RowHash(sent_columns, self.seed) if sent_columns and self.seed is not None else None,
            soft_delete_columns=definition.soft_delete_columns,
        )


@contextmanager
def hold_at_one_lsn(subscription: Subscription, lake: Lake, log: Log) -> Iterator[SubscriptionAtLsn]:
    """Export a snapshot, and bring the subscription up to its LSN. During the `with` block, both stay as they are."""
    slot_stream = subscription.slot_stream
    slot_stream.source.check_ready()
    # Each check has another seed. If two different rows have the same hash in one check, their hashes differ in the next.
    seed = secrets.randbits(64)
    with slot_stream.source.connect() as connection, ExitStack() as stack:
        catalog = slot_stream.with_defined_publications(read_catalog(connection))
        table_by_name = subscription.tables(catalog)
        # Without these locks, other processes could read the slot or apply changes beyond the LSN of the snapshot.
        with slot_stream.hold_lock():
            snapshot = stack.enter_context(export_snapshot(slot_stream.source, PATIENT_SECONDS))
            stack.enter_context(slot_stream.source.hold_lock(subscription.name))
            drain_slot(slot_stream, lake, [subscription], log, target_lsn=snapshot.lsn)
            transform(subscription, lake, log)
            applied = apply(subscription, lake, log)
        conninfo = stack.enter_context(slot_stream.source.make_executor_conninfo().keep_adbc_sessions())
        yield SubscriptionAtLsn(
            subscription,
            lake,
            connection,
            conninfo,
            catalog,
            table_by_name,
            TableStates(lake, subscription.name).read_newest(),
            snapshot,
            seed if has_same_hashes(connection, seed) else None,
            find_tables_with_hidden_rows(
                connection, [replicated_table.table.oid for replicated_table in table_by_name.values()]
            ),
            applied,
        )


def check_consistency(
    subscription: Subscription,
    lake: Lake,
    log: Log,
    names_to_check: TableNames = None,
    warn: Log = no_log,
    receive_applied: OnApplied = ignore_applied,
) -> list[TableConsistency]:
    """Compare replicas with the publisher at one LSN: those of `names_to_check`, or all if it is None.

    `receive_applied` gets what was applied to reach the LSN.

    If a table is altered or rewritten during its comparison, it is compared again, at a later LSN. `warn` receives a
    warning if the changes of some partitions are not sent. It also receives one for each table that differs and whose
    publications do not publish all operations.
    """
    final_result_by_table: dict[Name, TableConsistency] = {}
    warnings: dict[str, None] = {}

    def compare(names: TableNames) -> list[Name]:
        with hold_at_one_lsn(subscription, lake, log) as subscription_at_lsn:
            receive_applied(subscription_at_lsn.applied)
            compared_names = [
                name for name in subscription_at_lsn.table_by_name if names is None or name in names
            ]
            result_by_table = {
                name: _compare_table(subscription_at_lsn, name, log) for name in compared_names
            }
            rewritten_tables = subscription_at_lsn.find_rewritten_tables(
                [name for name in compared_names if result_by_table[name].differing]
            )
            differing_tables = [
                subscription_at_lsn.table_by_name[name]
                for name in compared_names
                if result_by_table[name].differing
            ]
            warnings.update(
                dict.fromkeys(
                    w.message for w in find_unsent_leaves(subscription, subscription_at_lsn.catalog)
                )
            )
            warnings.update(dict.fromkeys(filter(None, map(_make_operations_warning, differing_tables))))
        final_result_by_table.update(result_by_table)
        final_result_by_table.update(
            {
                name: TableConsistency(*name, subscription_at_lsn.snapshot.lsn, problem=REWRITTEN_PROBLEM)
                for name in rewritten_tables
            }
        )
        return [
            *rewritten_tables,
            *(name for name in compared_names if result_by_table[name].problem == ALTERED_PROBLEM),
        ]

    repeat_for_altered_tables(compare, names_to_check)
    for warning in warnings:
        warn(warning)
    return list(final_result_by_table.values())


def _make_operations_warning(replicated_table: ReplicatedTable) -> str | None:
    """Warn that the table's publications do not publish all operations; None if they publish all.

    PostgreSQL documentation, 29.1 Publication.
    """
    unpublished_operations = [
        f"{operation.upper()}s" for operation in OPERATIONS if operation not in replicated_table.operations
    ]
    if not unpublished_operations:
        return None
    return (
        f'table "{replicated_table.table.qualified_name}": its publications publish no {", ".join(unpublished_operations)}, so the replica lacks'
        " these changes; `pgsieve check --repair` brings it up to date"
    )


def repeat_for_altered_tables(run_step: Callable[[TableNames], Collection[Name]], names: TableNames) -> None:
    """Run a step for some tables. It returns those that were altered meanwhile, and is run again for them."""
    for _ in range(MAX_ATTEMPTS):
        names = run_step(names)
        if not names:
            return


def _compare_table(subscription_at_lsn: SubscriptionAtLsn, name: Name, log: Log) -> TableConsistency:
    """Compare one table."""
    lsn, subscription = subscription_at_lsn.snapshot.lsn, subscription_at_lsn.subscription.name
    if problem := subscription_at_lsn.find_problem(name):
        return TableConsistency(*name, lsn, problem=problem)
    replicated_table = subscription_at_lsn.table_by_name[name]
    log(f"comparing {replicated_table.table.quoted_name} of {subscription}")
    try:
        with (
            subscription_at_lsn.translate_errors(name, "compare"),
            name_jobs(subscription, f"check of {replicated_table.table.quoted_name}"),
        ):
            if replicated_table.table.unsent_leaves:
                verify_foreign_servers(subscription_at_lsn.subscription.slot_stream.source, name)
            return _make_result(replicated_table, lsn, subscription_at_lsn.make_sides(name).compare())
    except LakeError as error:
        problem = add_copy_command(subscription, name, describe_error(subscription_at_lsn.lake, error))
        return TableConsistency(*name, lsn, problem=problem)
    except PgsieveError as error:
        if not (is_lock_error(error) or is_foreign_server_error(error)):
            raise
        return TableConsistency(*name, lsn, problem=error.message)


def _make_result(replicated_table: ReplicatedTable, lsn: int, difference: Difference) -> TableConsistency:
    """Make the result for a table. The values of the rows in `difference.sample` are in the columns c0, c1 and so on."""
    key_indexes = [
        index for index, column in enumerate(replicated_table.columns) if column in replicated_table.key
    ]
    return TableConsistency(
        schema=replicated_table.table.schema,
        table=replicated_table.table.name,
        lsn=lsn,
        publisher_rows=difference.publisher_rows,
        replica_rows=difference.replica_rows,
        counts=difference.counts,
        keys=tuple(
            _format_key(replicated_table, [row[f"c{index}"] for index in key_indexes], row["count"])
            for row in difference.sample
        ),
    )


def _format_key(replicated_table: ReplicatedTable, values: Sequence[str], count: int) -> str:
    """Describe a row that differs: its key, and the side that has it. Without a key, no value of the row is written."""
    side = "missing from the replica" if count > 0 else "only in the replica"
    if not replicated_table.key:
        return f"a row {side}"
    names = ", ".join(column for column in replicated_table.columns if column in replicated_table.key)
    return f"({names})=({', '.join(values)}) {side}"
