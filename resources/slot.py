"""The replication slot of a source, and the capture publications it reads.

In: a `Source` and the planned capture. Out: the slot's state, its messages as Arrow batches, and its
confirmed position moved on (`advance`). A slot is read with pg_logical_slot_peek_binary_changes (section
9.28.6) and confirmed by pg_replication_slot_advance only after what was read is durable. Raises `SlotError`
subclasses for a slot that is missing, in use, ahead of what is durable, or invalidated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential

from decoding.lsn import format_lsn, parse_lsn
from decoding.publication import Catalog
from decoding.routing import CapturePublication
from resources.pgoutput import PgoutputOptions
from resources.postgres import SourceError, literal, quote, refusing

#: Messages come in Arrow batches of about so many bytes: a writer holds several at a time.
_BATCHES = {"adbc.postgresql.batch_size_hint_bytes": str(4 * 1024 * 1024)}


class SlotError(SourceError):
    """The replication slot cannot deliver what comes next."""


class SlotMissingError(SlotError):
    """Delta holds progress of a slot that no longer exists."""


class SlotAheadError(SlotError):
    """The slot was confirmed past what Delta holds: changes are missing."""


class SlotInvalidatedError(SlotError):
    """The server removed WAL that the slot still needed."""


class SlotInUseError(SlotError):
    """Another process reads the slot."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of pg_replication_slots, with the distance to the current WAL position in bytes."""

    name: str
    plugin: str
    active: bool
    confirmed_lsn: int
    restart_lsn: int
    wal_status: str
    lag: int
    two_phase: bool


def current_lsn(connection: psycopg.Connection[Any]) -> int:
    """The publisher's current WAL insert position: every transaction committed by now ends before it."""
    row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def slot_state(connection: psycopg.Connection[Any], slot: str) -> SlotState | None:
    """The slot's state, or None where it does not exist in this database."""
    row = connection.execute(
        "select slot_name, plugin, active, confirmed_flush_lsn::text, restart_lsn::text, coalesce(wal_status, ''),"
        " (pg_current_wal_insert_lsn() - confirmed_flush_lsn)::bigint,"
        " coalesce((to_jsonb(s) ->> 'two_phase')::boolean, false)"  # a column from 14 on
        " from pg_replication_slots s where slot_name = %s and database = current_database()",
        [slot],
    ).fetchone()
    if row is None:
        return None
    name, plugin, active, confirmed, restart, wal_status, lag, two_phase = row
    lsns = parse_lsn(confirmed or "0/0"), parse_lsn(restart or "0/0")
    return SlotState(name, plugin, active, *lsns, wal_status, lag or 0, two_phase)


def create_slot(
    connection: psycopg.Connection[Any], source: str, slot: str, *, two_phase: bool = False
) -> int:
    """Create the slot with pgoutput; the LSN from which it delivers."""
    options = ", false, true" if two_phase else ""  # not temporary, two_phase: an argument from 14 on
    with refusing(source, f'create the replication slot "{slot}"'):
        row = connection.execute(
            f"select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput'{options})", [slot]
        ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def verify_slot(state: SlotState | None, source: str, slot: str, durable: int | None) -> None:
    """Compare the slot with the LSN up to which Delta holds its changes; raises SlotError on a gap.

    A slot behind Delta is harmless: what it sends again is left out. One ahead has lost changes.
    """
    resynchronise = "copy every table again: remove the source's change log folder and run `pgsieve run`"
    if state is None:
        if durable is None:
            return
        raise SlotMissingError(
            f'source "{source}": replication slot "{slot}" does not exist, but Delta holds its changes up to'
            f" {format_lsn(durable)}: changes since then are lost",
            hint=resynchronise,
            sqlstate="42704",
        )
    if state.plugin != "pgoutput":
        raise SlotError(
            f'source "{source}": replication slot "{slot}" uses the output plugin "{state.plugin}", not pgoutput',
            hint="choose another `slot` in pgsieve.yaml",
        )
    if state.wal_status == "lost":
        raise SlotInvalidatedError(
            f'source "{source}": can no longer access replication slot "{slot}": it has been invalidated, changes since'
            f" {format_lsn(durable or state.confirmed_lsn)} are lost",
            hint=f"raise max_slot_wal_keep_size, drop the slot, then {resynchronise}",
            sqlstate="55000",
        )
    if durable is not None and state.confirmed_lsn > durable:
        raise SlotAheadError(
            f'source "{source}": replication slot "{slot}" is confirmed up to {format_lsn(state.confirmed_lsn)}, but'
            f" Delta holds its changes only up to {format_lsn(durable)}: the changes between are lost",
            hint=f"the slot was advanced or re-created by somebody else; {resynchronise}",
        )


@retry(
    retry=retry_if_exception_type(psycopg.errors.ObjectInUse),
    stop=stop_after_delay(10),
    wait=wait_exponential(0.05, max=1),
    reraise=True,
)
def _advance(connection: psycopg.Connection[Any], slot: str, lsn: int) -> None:
    connection.execute("select pg_replication_slot_advance(%s, %s::pg_lsn)", [slot, format_lsn(lsn)])


def advance(connection: psycopg.Connection[Any], source: str, slot: str, lsn: int) -> None:
    """Confirm everything that commits before `lsn`; a position the slot has passed is left as it is."""
    state = slot_state(connection, slot)
    if state is None or state.confirmed_lsn >= lsn:
        return
    with refusing_slot(source, slot, "advance"):
        _advance(connection, slot, lsn)


@contextmanager
def refusing_slot(source: str, slot: str, what: str) -> Iterator[None]:
    """Turn the server's refusal to do `what` to the slot into a SourceError; SlotInUseError where it is in use."""
    try:
        with refusing(source, f'{what} the replication slot "{slot}"'):
            yield
    except SourceError as error:
        if error.sqlstate != "55006":
            raise
        raise SlotInUseError(
            f'source "{source}": replication slot "{slot}" is in use by another process',
            hint="stop the other consumer, or give each pgsieve configuration a `slot` of its own",
            sqlstate="55006",
        ) from error


def drop_slot(connection: psycopg.Connection[Any], slot: str) -> None:
    """Drop the slot if it exists."""
    connection.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
        " where slot_name = %s and database = current_database()",
        [slot],
    )


def peek_query(
    slot: str, upto: int, options: PgoutputOptions, server_version: int, limit: int | None = None
) -> str:
    """The query that reads a slot up to `upto` without confirming anything.

    It delivers whole transactions: those whose commit record begins before `upto`, which are just those
    that pg_replication_slot_advance(slot, upto) confirms. `limit` ends it at the first commit after so
    many messages.
    """
    listed = ", ".join(literal(o) for option in options.arguments(server_version).items() for o in option)
    return (
        f"select data from pg_logical_slot_peek_binary_changes({literal(slot)},"
        f" {literal(format_lsn(upto))}, {limit or 'null'}, {listed})"
    )


def type_names(connection: psycopg.Connection[Any]) -> dict[int, str]:
    """The SQL names of the types that are not built in, by oid; with their schemas, as pg_recvlogical sees them."""
    with connection.transaction():
        connection.execute("set local search_path to ''")
        listed = connection.execute(
            "select oid::bigint, format_type(oid, null) from pg_type where oid >= 10000"
        )
        return dict(listed.fetchall())


def has_changes(connection: psycopg.Connection[Any], source: str, slot: str, query: str) -> bool:
    """Whether a peek delivers anything; ends decoding at the first message where its limit is 1.

    Raises SlotInUseError or SourceError where the server refuses to read the slot.
    """
    with refusing_slot(source, slot, "read"):
        return connection.execute(f"select 1 from ({query}) m limit 1").fetchone() is not None


def read_messages(conninfo: str, query: str) -> Iterator[pa.RecordBatch]:
    """Run a peek and yield its Arrow batches (data), with nothing held in memory; for executors, too."""
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(conninfo) as connection, connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**_BATCHES)
        cursor.execute(query)
        yield from cursor.fetch_record_batch()


def ensure_capture(
    connection: psycopg.Connection[Any],
    source: str,
    capture: str,
    planned: Sequence[CapturePublication],
    catalog: Catalog,
) -> tuple[str, ...]:
    """Create or alter the capture publications to hold just what is planned; their names.

    A publication that already publishes what is planned is left untouched, whoever owns it.
    """
    for publication in planned:
        name = capture + publication.suffix
        for statement in capture_statements(name, publication, catalog, connection.info.server_version):
            with refusing(source, f'prepare the capture publication "{name}"'):
                connection.execute(statement)
    return tuple(capture + p.suffix for p in planned)


def capture_statements(
    name: str, planned: CapturePublication, catalog: Catalog, server_version: int
) -> list[str]:
    """The SQL that makes the capture publication as planned; empty where it already is."""
    tables = ", ".join("only " * (t.kind == "r") + quote(t.schema, t.name) for t in planned.tables)
    options = (
        f"publish = {literal(', '.join(planned.operations))}, publish_via_partition_root = {planned.via_root}"
    )
    if server_version >= 180000:
        options += ", publish_generated_columns = stored"
    existing = catalog.publications.get(name)
    if existing is None:
        return [f"create publication {quote(name)} for table {tables} with ({options})"]
    statements = []
    if existing.operations != set(planned.operations) or existing.via_root != planned.via_root:
        statements.append(f"alter publication {quote(name)} set ({options})")
    wanted = {t.oid for t in planned.tables}
    if not (
        existing.all_tables
        or wanted <= {t.oid for t in existing.tables if t.where is None and t.columns is None}
    ):
        statements.append(f"alter publication {quote(name)} set table {tables}")
    return statements


def drop_publications(connection: psycopg.Connection[Any], names: Sequence[str]) -> None:
    """Drop publications that were made a moment ago, where something later failed."""
    for name in names:
        with suppress(psycopg.Error):
            connection.execute(f"drop publication if exists {quote(name)}")
