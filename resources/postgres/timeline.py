"""Verifies that the server has all changes that were read from it, or from the primary that it has replaced.

If a primary fails, a standby is promoted, and takes its place. A promoted standby has the system identifier of its
primary, but a new timeline. It lacks the transactions that the primary committed after the standby left the
primary's timeline (PostgreSQL documentation, Timelines).

In: the timeline and the LSN up to which changes were read.
Out: nothing, if the server has these changes.

Raises TimelineError if the server's history does not contain the timeline, or left it before the LSN.
"""

import re
from collections.abc import Iterable
from typing import Any

import psycopg

from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.postgres.errors import translate_errors
from pgsieve.resources.postgres.slot import SlotError, make_resync_hint
from pgsieve.resources.postgres.source import Source


class TimelineError(SlotError):
    """The present server lacks some of the changes that were read from its former primary."""


def read_current_timeline(connection: psycopg.Connection[Any]) -> int:
    """The timeline that the server writes to. The names of its WAL files begin with it.

    PostgreSQL does not show the timeline that a standby replays. For a standby the result is the newer of two
    timelines: the one that the standby receives, and the one of its last restartpoint.
    """
    row = connection.execute(
        "select case when pg_is_in_recovery()"
        " then greatest((pg_stat_get_wal_receiver()).received_tli, (pg_control_checkpoint()).timeline_id)"
        " else ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer end"
    ).fetchone()
    assert row is not None
    return int(row[0])


def verify_timeline(
    source: Source, timeline: int, position_lsn: int, present_timeline: int, subscriptions: Iterable[str] = ()
) -> None:
    """Raise TimelineError unless the server has all changes of `timeline` up to `position_lsn`.

    `present_timeline` is the timeline that the server is on now. It must differ from `timeline`.
    """
    end_lsn = _read_end_lsns(source, present_timeline).get(timeline)
    if end_lsn is not None and position_lsn <= end_lsn:
        return
    problem = (
        f"timeline {timeline} is not in its history"
        if end_lsn is None
        else f"left timeline {timeline} at {format_lsn(end_lsn)}"
    )
    raise TimelineError(
        f'source "{source.name}": Delta holds changes of timeline {timeline} up to {format_lsn(position_lsn)}, but the'
        f" server is now on timeline {present_timeline}, and {problem}: it may lack some of these changes",
        hint=f"{make_resync_hint(subscriptions)}; synchronized_standby_slots on the primary prevents this",
        sqlstate="55000",
    )


def _read_end_lsns(source: Source, timeline: int) -> dict[int, int]:
    """Maps each earlier timeline to the LSN where it was left (Streaming Replication Protocol, TIMELINE_HISTORY)."""
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
