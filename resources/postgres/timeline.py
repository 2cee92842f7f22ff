"""Verifies that the server's history includes all changes that were read from it or from its former primary.

In: the timeline and LSN up to which changes were read. Raises TimelineError if the timeline ends before this LSN
in the server's history, or is not in the history. A promoted standby has its primary's system identifier, but a
new timeline. It lacks the transactions that the primary committed after the standby left the primary's timeline
(PostgreSQL documentation, Timelines).
"""

import re
from collections.abc import Iterable
from typing import Any

import psycopg

from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.postgres.errors import translate_errors
from pgsieve.resources.postgres.slot import SlotError, resync_hint
from pgsieve.resources.postgres.source import Source


class TimelineError(SlotError):
    """Some changes that were read are not in the present server's history."""


def current_timeline(connection: psycopg.Connection[Any]) -> int:
    """The timeline that the server writes to, by the names of its WAL files.

    For a standby it is the newer one of the timeline that the standby receives and the timeline of its last
    restartpoint: PostgreSQL does not show the timeline that a standby replays.
    """
    row = connection.execute(
        "select case when pg_is_in_recovery()"
        " then greatest((pg_stat_get_wal_receiver()).received_tli, (pg_control_checkpoint()).timeline_id)"
        " else ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer end"
    ).fetchone()
    assert row is not None
    return int(row[0])


def refuse_divergence(
    source: Source, timeline: int, position: int, current: int, subscriptions: Iterable[str] = ()
) -> None:
    """Raise TimelineError unless the server, which is on timeline `current`, has all of `timeline` up to `position`."""
    left_at = _history(source, current).get(timeline)
    if left_at is not None and position <= left_at:
        return
    fate = "is not in the server's history" if left_at is None else f"was left at {format_lsn(left_at)}"
    raise TimelineError(
        f'source "{source.name}": Delta holds changes of timeline {timeline} up to {format_lsn(position)}, but that'
        f" {fate}, which is now on timeline {current}: this server lacks what was committed between",
        hint=f"{resync_hint(subscriptions)}; synchronized_standby_slots on the primary prevents this",
        sqlstate="55000",
    )


def _history(source: Source, timeline: int) -> dict[int, int]:
    """The earlier timelines, and the LSN where each was left (Streaming Replication Protocol, TIMELINE_HISTORY)."""
    if timeline == 1:
        return {}
    with (
        source.connect(replication="database") as connection,
        translate_errors(source.name, "read the timeline history"),
    ):
        result = connection.pgconn.exec_(f"TIMELINE_HISTORY {timeline:d}".encode())
        content = result.get_value(0, 1) if result.ntuples else None
        if content is None:
            raise psycopg.errors.error_from_result(result, connection.info.encoding)
    lines = re.findall(r"^\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)", content.decode(), re.MULTILINE)
    return {int(number): parse_lsn(lsn) for number, lsn in lines}
