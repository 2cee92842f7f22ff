"""Positions in a source's WAL: how far it is inserted, flushed and replayed, and which cluster wrote it.

In: a session. Out: LSNs and a transaction identifier as integers, the system identifier as text. Raises
PassingFaultError where a standby does not replay, else the session's errors. Sections 9.28.3, Backup Control
Functions, and 9.28.4, Recovery Control Functions.
"""

from contextlib import suppress
from typing import Any

import psycopg
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_exponential, wait_fixed

from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.postgres.errors import PassingFaultError

#: How long a standby may take to replay what it has received.
_REPLAY_SECONDS = 60.0
#: A commit within this time flushes the server's WAL up to its own record.
_FLUSH_SECONDS = 0.1


def current_lsn(connection: psycopg.Connection[Any]) -> int:
    """The publisher's current WAL flush position: a peek delivers what begins before it.

    Beyond it a commit may be inserted and not yet flushed: a peek would miss it, and an advance would confirm
    it. On a standby it is the replay position, to which both of these limit themselves there
    (GetXLogReplayRecPtr in src/backend/replication/logical/logicalfuncs.c and slotfuncs.c).
    """
    row = connection.execute(
        "select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end::text"
    ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def inserted_lsn(connection: psycopg.Connection[Any]) -> int:
    """The publisher's current WAL insert position: every transaction committed by now ends before it.

    On a standby a commit is visible a moment before pg_last_wal_replay_lsn passes it (ApplyWalRecord() in
    src/backend/access/transam/xlogrecovery.c). It was received before that, so this waits until everything
    received by now is replayed. Raises PassingFaultError where that takes too long.
    """
    row = connection.execute(
        "select pg_is_in_recovery(), case when pg_is_in_recovery()"
        " then greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) else pg_current_wal_insert_lsn() end::text"
    ).fetchone()
    assert row is not None
    recovering, lsn = row[0], parse_lsn(row[1])
    if recovering:
        try:
            Retrying(
                retry=retry_if_result(lambda replayed: replayed < lsn),
                stop=stop_after_delay(_REPLAY_SECONDS),
                wait=wait_exponential(0.01, max=1),
            )(current_lsn, connection)
        except RetryError:
            raise PassingFaultError(
                f"the standby has not replayed what it received up to {format_lsn(lsn)}",
                hint="see whether its recovery is paused, or waits for a query of its own",
                sqlstate="55000",
            ) from None
    return lsn


def flushed_lsn(connection: psycopg.Connection[Any]) -> int:
    """`current_lsn` at the end of a record, so that a peek and an advance read up to there without waiting.

    A server also flushes pages of open transactions. A reader that reads up to such a page waits until the
    rest of its last record is flushed (read_local_xlog_page() in src/backend/access/transam/xlogutils.c):
    without a commit meanwhile, up to 15 seconds. So without a commit soon, an empty message is committed
    here.
    """
    try:
        flushed: int | None = Retrying(
            retry=retry_if_result(lambda lsn: lsn is None),
            stop=stop_after_delay(_FLUSH_SECONDS),
            wait=wait_fixed(0.01),
        )(_flushed_record, connection)
    except RetryError:
        flushed = None
        with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
            # Flushed here, whatever the role's own setting is; without waiting for standbys.
            connection.execute("set local synchronous_commit to local")
            connection.execute("select pg_logical_emit_message(true, 'pgsieve', '')")
    return flushed or current_lsn(connection)


def _flushed_record(connection: psycopg.Connection[Any]) -> int | None:
    """`current_lsn`, or None if it may lie within a record: between two pages of which the second has been written."""
    row = connection.execute(
        "select lsn::text, (case when pg_is_in_recovery() then lsn else pg_current_wal_insert_lsn() end - lsn)::bigint,"
        " current_setting('wal_block_size')::int, pg_size_bytes(current_setting('wal_segment_size'))"
        " from (select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end"
        " offset 0) flushed(lsn)"
    ).fetchone()
    assert row is not None
    position, written, page_bytes, segment_bytes = row
    lsn = parse_lsn(position)
    # The first record of a page is inserted behind its header (XLogPageHeaderData, XLogLongPageHeaderData).
    header_bytes = 40 if lsn % segment_bytes == 0 else 24
    return None if lsn % page_bytes == 0 and written > header_bytes else lsn


def next_transaction(connection: psycopg.Connection[Any]) -> int:
    """The transaction identifier that is assigned next: no transaction with it or a later one has changed anything yet.

    age() counts from it (xid_age() in src/backend/utils/adt/xid.c). A snapshot's xmax may be that of a running
    transaction.
    """
    row = connection.execute("select age('3'::xid) + 3::bigint").fetchone()
    assert row is not None
    return int(row[0]) % 2**32


def system_identifier(connection: psycopg.Connection[Any]) -> str:
    """Identifies the publisher's cluster, and its physical standbys, among all clusters."""
    row = connection.execute("select system_identifier::text from pg_control_system()").fetchone()
    assert row is not None
    return str(row[0])
