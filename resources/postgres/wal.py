"""Positions in a source's WAL: how far it is inserted, flushed and replayed, and which cluster wrote it.

In: a session. Out: LSNs and a transaction identifier as integers, the system identifier as text. Raises
PassingFaultError if a standby does not replay, and the session's errors. Sections 9.28.3, Backup Control
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
#: How long to wait for another session's commit, which flushes the WAL up to the end of its own record.
_FLUSH_SECONDS = 0.1


def current_lsn(connection: psycopg.Connection[Any]) -> int:
    """The publisher's current WAL flush position, up to which a peek delivers commits.

    Beyond this position a commit may be inserted and not yet flushed. A peek would miss it, and an advance
    would confirm it. On a standby the position is the replay position, which limits a peek and an advance
    there (GetXLogReplayRecPtr in src/backend/replication/logical/logicalfuncs.c and slotfuncs.c).
    """
    row = connection.execute(
        "select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end::text"
    ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def inserted_lsn(connection: psycopg.Connection[Any]) -> int:
    """The publisher's current WAL insert position; every transaction committed by now ends before it.

    On a standby a commit is visible a moment before pg_last_wal_replay_lsn passes it (ApplyWalRecord() in
    src/backend/access/transam/xlogrecovery.c). So this function waits until the standby has replayed all WAL
    that it has received by now. Raises PassingFaultError if that takes too long.
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
                f"the standby has not replayed the WAL that it received, up to {format_lsn(lsn)}",
                hint="check whether its recovery is paused, or waits for a query on the standby",
                sqlstate="55000",
            ) from None
    return lsn


def flushed_lsn(connection: psycopg.Connection[Any]) -> int:
    """`current_lsn` at the end of a record, so that a peek and an advance up to it do not wait.

    A server also flushes pages of open transactions. A peek up to the end of such a page waits until the rest
    of the page's last record is flushed (read_local_xlog_page() in src/backend/access/transam/xlogutils.c).
    Without a commit that takes up to 15 seconds. So if no session commits soon, this function commits an
    empty message.
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
            # Flush the commit, whatever the role's setting is, but do not wait for standbys.
            connection.execute("set local synchronous_commit to local")
            connection.execute("select pg_logical_emit_message(true, 'pgsieve', '')")
    return flushed or current_lsn(connection)


def _flushed_record(connection: psycopg.Connection[Any]) -> int | None:
    """`current_lsn`; None if it may lie within a record, at the end of a page with WAL on the next page."""
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
    """The transaction identifier that is assigned next.

    No transaction with it or a later one has changed anything yet. age() counts from this identifier
    (xid_age() in src/backend/utils/adt/xid.c). A snapshot's xmax would not do, as a running transaction may
    have it.
    """
    row = connection.execute("select age('3'::xid) + 3::bigint").fetchone()
    assert row is not None
    return int(row[0]) % 2**32


def system_identifier(connection: psycopg.Connection[Any]) -> str:
    """The identifier that the publisher's cluster shares with its physical standbys, and with no other cluster."""
    row = connection.execute("select system_identifier::text from pg_control_system()").fetchone()
    assert row is not None
    return str(row[0])
