"""Reads positions in a publisher's WAL: how far it is inserted, flushed and replayed; and which cluster wrote it.

In: a session.
Out: LSNs and a transaction id as integers; the system identifier as a text.

Raises TransientError if a standby does not replay, and the session's errors.

PostgreSQL documentation, Backup Control Functions, Recovery Control Functions.
"""

from contextlib import suppress
from typing import Any

import psycopg
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_exponential, wait_fixed

from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.postgres.errors import TransientError

#: How long a standby may take to replay all WAL that it has received.
_REPLAY_SECONDS = 60.0
#: How long to wait for a commit of another session, which flushes the WAL up to the end of a record.
_FLUSH_SECONDS = 0.1


def read_current_lsn(connection: psycopg.Connection[Any]) -> int:
    """The publisher's current WAL flush position. A peek (a read of the slot) delivers the commits up to this position.

    A later commit may already be inserted but not yet flushed, and a peek does not deliver it yet. An advance of the
    slot to the insert position would confirm this commit, and it would be lost. On a standby the result is the replay
    position, which limits a peek and an advance (GetXLogReplayRecPtr in src/backend/replication/logical/logicalfuncs.c
    and slotfuncs.c).
    """
    row = connection.execute(
        "select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end::text"
    ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def read_inserted_lsn(connection: psycopg.Connection[Any]) -> int:
    """The publisher's current WAL insert position. The records of all transactions that have committed are before it.

    On a standby a commit becomes visible a moment before pg_last_wal_replay_lsn passes it (ApplyWalRecord() in
    src/backend/access/transam/xlogrecovery.c). So this function waits until the standby has replayed all WAL that
    it has received. Raises TransientError if this takes too long.
    """
    row = connection.execute(
        "select pg_is_in_recovery(), case when pg_is_in_recovery()"
        " then greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) else pg_current_wal_insert_lsn() end::text"
    ).fetchone()
    assert row is not None
    is_standby, lsn = row[0], parse_lsn(row[1])
    if is_standby:
        try:
            Retrying(
                retry=retry_if_result(lambda replayed: replayed < lsn),
                stop=stop_after_delay(_REPLAY_SECONDS),
                wait=wait_exponential(0.01, max=1),
            )(read_current_lsn, connection)
        except RetryError:
            raise TransientError(
                f"the standby has not replayed the WAL that it received, up to {format_lsn(lsn)}",
                hint="check whether its recovery is paused, or waits for a query on the standby",
                sqlstate="55000",
            ) from None
    return lsn


def read_flushed_lsn(connection: psycopg.Connection[Any]) -> int:
    """A position like that of `read_current_lsn`, but at the end of a WAL record.

    A peek or an advance up to such a position does not wait.

    The server also flushes full pages of WAL of open transactions, and a record may go on beyond the end of such a
    page. A peek up to the end of the page waits until the whole record is flushed (read_local_xlog_page() in
    src/backend/access/transam/xlogutils.c). If no session commits, this takes up to 15 seconds. So this function
    waits a moment for a commit of another session; if there is none, it commits an empty message itself. If the role
    may not emit messages, the result may lie within a record.
    """
    try:
        position: int | None = Retrying(
            retry=retry_if_result(lambda lsn: lsn is None),
            stop=stop_after_delay(_FLUSH_SECONDS),
            wait=wait_fixed(0.01),
        )(_read_record_end, connection)
    except RetryError:
        position = None
        with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
            # The commit must be flushed, whatever the role's setting is, but must not wait for standbys.
            connection.execute("set local synchronous_commit to local")
            connection.execute("select pg_logical_emit_message(true, 'pgsieve', '')")
    return position or read_current_lsn(connection)


def _read_record_end(connection: psycopg.Connection[Any]) -> int | None:
    """The position of `read_current_lsn`; None if it may lie within a record.

    A record may go on beyond the position if a page ends there, and there is WAL on the next page.
    """
    row = connection.execute(
        "select lsn::text, (case when pg_is_in_recovery() then lsn else pg_current_wal_insert_lsn() end - lsn)::bigint,"
        " current_setting('wal_block_size')::int, pg_size_bytes(current_setting('wal_segment_size'))"
        " from (select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end"
        " offset 0) flushed(lsn)"
    ).fetchone()
    assert row is not None
    position, later_bytes, page_bytes, segment_bytes = row
    lsn = parse_lsn(position)
    # A page begins with a header (XLogPageHeaderData, XLogLongPageHeaderData). If there are more bytes than this header, the
    # next page has WAL.
    header_bytes = 40 if lsn % segment_bytes == 0 else 24
    return None if lsn % page_bytes == 0 and later_bytes > header_bytes else lsn


def read_next_xid(connection: psycopg.Connection[Any]) -> int:
    """The transaction id (xid) that the server will assign next. No transaction with this xid or a later one exists yet.

    The query adds the age of an xid to this xid, because age() counts from the next xid (xid_age() in
    src/backend/utils/adt/xid.c). The xmax of a snapshot would not do: a transaction with this xid may run already.
    """
    row = connection.execute("select age('3'::xid) + 3::bigint").fetchone()
    assert row is not None
    return int(row[0]) % 2**32


def read_system_identifier(connection: psycopg.Connection[Any]) -> str:
    """The system identifier of the publisher's cluster.

    Its physical standbys, and clusters restored from its physical backups, have the same identifier.
    """
    row = connection.execute("select system_identifier::text from pg_control_system()").fetchone()
    assert row is not None
    return str(row[0])
