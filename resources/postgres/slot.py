"""Creates, verifies, confirms and drops the replication slot of a source.

In: a `Source`, which is a database of a publisher.
Out: the state of the slot.

`pgsieve.resources.postgres.peeks` reads the slot. After the messages are durable, pg_replication_slot_advance() confirms
the slot (PostgreSQL documentation, Replication Management Functions). Raises `SlotError` or a subclass if the slot
cannot deliver the changes, for example because it is missing, in use, invalidated, or ahead of the lake's position, the
LSN up to which the lake has all changes.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from tenacity import (
    Retrying,
    retry,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_exponential,
    wait_fixed,
)

from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.postgres.errors import (
    SourceError,
    translate_errors,
)
from pgsieve.resources.postgres.source import Source, quote

_LOGGER = logging.getLogger(__name__)


class SlotError(SourceError):
    """The replication slot cannot deliver the next changes."""


class SlotMissingError(SlotError):
    """The slot no longer exists, although the lake has changes that were read from it."""


class SlotAheadError(SlotError):
    """The slot was confirmed beyond the lake's position, so the changes between these positions are lost."""


class ServerSetBackError(SlotError):
    """The server's WAL ends before the lake's position, so the server's data was replaced by data of an earlier time."""


class SlotInvalidatedError(SlotError):
    """The server has invalidated the slot, for example because it removed WAL that the slot still needed."""


class SlotInUseError(SlotError):
    """Another process reads the slot."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of the view pg_replication_slots.

    Three fields are numbers of bytes of WAL. `lag_bytes` counts the WAL after the confirmed position,
    `retained_bytes` the WAL after the restart position. `safe_bytes` is the WAL that may still be written before the
    slot can be lost; None if there is no limit, or if the slot is already lost. `invalidation_reason` is empty before
    version 17.
    """

    name: str
    plugin: str
    is_active: bool
    confirmed_lsn: int
    restart_lsn: int
    wal_status: str
    lag_bytes: int
    retained_bytes: int
    safe_bytes: int | None
    has_two_phase: bool
    has_failover: bool
    invalidation_reason: str


#: Maps the reason of an invalidation to what prevents a further invalidation (PostgreSQL documentation, view
#: pg_replication_slots).
_REMEDIES: Mapping[str, str] = {
    "wal_removed": "raise max_slot_wal_keep_size",
    "idle_timeout": "raise idle_replication_slot_timeout, or run more often",
    "rows_removed": "set hot_standby_feedback = on at the standby",
    "wal_level_insufficient": "set wal_level = logical at the primary",
}


def read_slot_state(connection: psycopg.Connection[Any], slot: str) -> SlotState | None:
    """The slot's state; None if it does not exist in this database."""
    row = connection.execute(
        "select slot_name, plugin, active, confirmed_flush_lsn::text, restart_lsn::text, coalesce(wal_status, ''),"
        " (now.lsn - confirmed_flush_lsn)::bigint, (now.lsn - restart_lsn)::bigint, safe_wal_size::bigint,"
        " coalesce((to_jsonb(s) ->> 'two_phase')::boolean, false),"  # A column from 14 on.
        " coalesce((to_jsonb(s) ->> 'failover')::boolean, false),"  # From 17 on.
        " coalesce(to_jsonb(s) ->> 'invalidation_reason', '')"
        " from pg_replication_slots s, (select case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
        " else pg_current_wal_insert_lsn() end) now(lsn) where slot_name = %s and database = current_database()",
        [slot],
    ).fetchone()
    if row is None:
        return None
    (
        name,
        plugin,
        is_active,
        confirmed_lsn,
        restart_lsn,
        wal_status,
        lag_bytes,
        retained_bytes,
        safe_bytes,
        *other_fields,
    ) = row
    lsns = parse_lsn(confirmed_lsn or "0/0"), parse_lsn(restart_lsn or "0/0")
    return SlotState(
        name,
        plugin,
        is_active,
        *lsns,
        wal_status,
        lag_bytes or 0,
        retained_bytes or 0,
        safe_bytes,
        *other_fields,
    )


def create_slot(
    connection: psycopg.Connection[Any],
    source_name: str,
    slot: str,
    *,
    two_phase: bool = False,
    failover: bool = False,
) -> int:
    """Create the slot with the output plugin pgoutput. Return the LSN from which on it delivers changes."""
    # The arguments temporary, two_phase (from 14 on) and failover (from 17 on).
    options = f", false, {two_phase}" + ", true" * failover if two_phase or failover else ""
    if failover:
        verify_failover_support(connection, source_name, slot)
    warn_of_standby_wait(connection, source_name)
    try:
        with translate_errors(source_name, f'create the replication slot "{slot}"'):
            row = connection.execute(
                f"select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput'{options})", [slot]
            ).fetchone()
    except SourceError as error:
        if error.sqlstate != "42710":
            raise
        hint = "it belongs to another database of the cluster: give the source its own `slot` in pgsieve.yaml"
        raise SlotError(error.message, hint=hint, sqlstate=error.sqlstate) from error
    assert row is not None
    return parse_lsn(row[0])


def warn_of_standby_wait(connection: psycopg.Connection[Any], source_name: str) -> None:
    """Log a warning if the server is a standby, because creating a slot may then take long.

    A standby creates a slot only once its primary has logged its running transactions (PostgreSQL documentation,
    Replication Slots).
    """
    is_in_recovery = connection.pgconn.exec_(b"select pg_is_in_recovery()").get_value(0, 0)
    if is_in_recovery == b"t":
        _LOGGER.warning(
            'source "%s": a standby makes a slot once its primary has logged its running transactions; if the primary is'
            " idle, `select pg_log_standby_snapshot()` there logs them",
            source_name,
        )


def verify_failover_support(connection: psycopg.Connection[Any], source_name: str, slot: str) -> None:
    """Raise SlotError if the server is too old to synchronize slots to standbys."""
    if connection.info.server_version < 170000:
        raise SlotError(
            f'source "{source_name}": replication slot "{slot}" cannot have `failover` before PostgreSQL 17',
            hint="leave `failover` out; then every table has to be copied again after a failover",
            sqlstate="0A000",
        )


def enable_failover(source: Source, slot: str) -> None:
    """Make the server synchronize the slot to standbys, as ALTER SUBSCRIPTION ... SET (failover) does."""
    with source.connect(replication="database", cursor_factory=psycopg.ClientCursor) as connection:
        verify_failover_support(connection, source.name, slot)
        with translate_slot_errors(source.name, slot, "alter"):
            connection.execute(f"ALTER_REPLICATION_SLOT {quote(slot)} (FAILOVER true)".encode())


def make_resync_hint(subscriptions: Iterable[str], options: str = "") -> str:
    """The hint of errors after which the tables of these subscriptions have to be copied again."""
    commands = " and ".join(f"`pgsieve resync {name}{options}`" for name in subscriptions)
    return f"copy every table again: {commands or f'`pgsieve resync{options}` its subscriptions'}"


def verify_slot(
    state: SlotState | None,
    source_name: str,
    slot: str,
    durable_lsn: int | None,
    subscriptions: Iterable[str] = (),
) -> None:
    """Raise SlotError if the slot cannot deliver all changes that the lake lacks.

    - `durable_lsn`: the LSN up to which the lake has the slot's changes; None if the lake has none. The slot may be
      behind this LSN. In that case it sends some changes again, and they are left out.
    - `subscriptions`: the subscriptions that read the slot
    """
    hint = make_resync_hint(subscriptions)
    if state is None:
        if durable_lsn is None:
            return
        raise SlotMissingError(
            f'source "{source_name}": replication slot "{slot}" does not exist, but Delta holds its changes up to'
            f" {format_lsn(durable_lsn)}: changes since then are lost",
            hint=hint,
            sqlstate="42704",
        )
    if state.plugin != "pgoutput":
        raise SlotError(
            f'source "{source_name}": replication slot "{slot}" uses the output plugin "{state.plugin}", not pgoutput',
            hint="choose another `slot` in pgsieve.yaml",
        )
    if state.wal_status == "lost":
        raise SlotInvalidatedError(
            f'source "{source_name}": can no longer access replication slot "{slot}": it has been invalidated, changes since'
            f" {format_lsn(durable_lsn or state.confirmed_lsn)} are lost",
            hint=f"{_REMEDIES.get(state.invalidation_reason, _REMEDIES['wal_removed'])}, then {hint}",
            sqlstate="55000",
        )
    if durable_lsn is not None and state.confirmed_lsn > durable_lsn:
        raise SlotAheadError(
            f'source "{source_name}": replication slot "{slot}" is confirmed up to {format_lsn(state.confirmed_lsn)}, but'
            f" Delta holds its changes only up to {format_lsn(durable_lsn)}: the changes between are lost",
            hint="another lake reads it, or it was advanced or created again by hand: give the source its own `slot`; or, if"
            f" no other lake needs this slot, {make_resync_hint(subscriptions, ' --take-over')}",
            sqlstate="55006",
        )


def verify_wal_end(
    connection: psycopg.Connection[Any], source_name: str, durable_lsn: int, subscriptions: Iterable[str] = ()
) -> None:
    """Raise ServerSetBackError if the server's WAL ends before `durable_lsn`, the lake's position.

    The server would give new commits LSNs before the lake's position, so pgsieve would leave these commits out. A
    standby is not checked: after a restart it is at an earlier position for a while, and replays from there.
    """
    # The caller has read `durable_lsn` before this position is read. In the other order, another process could have
    # advanced the lake beyond this position.
    row = connection.execute(
        "select case when not pg_is_in_recovery() then pg_current_wal_insert_lsn() end::text"
    ).fetchone()
    assert row is not None
    if row[0] is not None and (present_lsn := parse_lsn(row[0])) < durable_lsn:
        raise ServerSetBackError(
            f'source "{source_name}": the server is at {format_lsn(present_lsn)}, but Delta holds its changes up to'
            f" {format_lsn(durable_lsn)}: it was put back to an earlier state, and its new commits up to that LSN would be left out",
            hint=make_resync_hint(subscriptions),
            sqlstate="55000",
        )


#: Repeats a function for up to 10 seconds. If a run was killed, its slot counts as in use until the server notices
#: that the run is gone.
_retry_while_in_use = retry(
    retry=retry_if_exception_type(psycopg.errors.ObjectInUse),
    stop=stop_after_delay(10),
    wait=wait_exponential(0.05, max=1),
    reraise=True,
)


@_retry_while_in_use
def _advance(connection: psycopg.Connection[Any], slot: str, lsn: int) -> None:
    connection.execute("select pg_replication_slot_advance(%s, %s::pg_lsn)", [slot, format_lsn(lsn)])


def advance_slot(connection: psycopg.Connection[Any], source_name: str, slot: str, lsn: int) -> None:
    """Confirm everything that commits before `lsn`. The slot never moves back. This may take long: the server decodes WAL."""
    with translate_slot_errors(source_name, slot, "advance"):
        _advance(connection, slot, lsn)


@contextmanager
def translate_slot_errors(source_name: str, slot: str, operation: str) -> Iterator[None]:
    """Turn the block's errors into a SourceError that names the operation. It is a SlotInUseError if the slot is in use."""
    try:
        with translate_errors(source_name, f'{operation} the replication slot "{slot}"'):
            yield
    except SourceError as error:
        if error.sqlstate != "55006":
            raise
        # The server's message ends with the reader's PID: 'replication slot "s" is active for PID 42'.
        reader = re.search(r"\d+(?=\D*$)", str(error.__cause__))
        raise SlotInUseError(
            f'source "{source_name}": replication slot "{slot}" is in use by another process'
            + (f" (server process {reader[0]})" if reader else ""),
            hint="stop the other consumer, which pg_stat_activity names, or give each pgsieve configuration its own `slot`;"
            " the server releases the slot of a killed process once it notices",
            sqlstate="55006",
        ) from error


def wait_until_free(connection: psycopg.Connection[Any], slot: str) -> None:
    """Wait up to 10 seconds until no process reads the slot. A walsender ends a moment after its client."""
    retry_while_active = retry_if_result(lambda state: state is not None and state.is_active)
    Retrying(
        retry=retry_while_active,
        stop=stop_after_delay(10),
        wait=wait_fixed(0.02),
        retry_error_callback=lambda _: None,
    )(read_slot_state, connection, slot)


@_retry_while_in_use
def _drop(connection: psycopg.Connection[Any], slot: str) -> bool:
    cursor = connection.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
        " where slot_name = %s and database = current_database()",
        [slot],
    )
    return cursor.rowcount > 0


def drop_slot(connection: psycopg.Connection[Any], source_name: str, slot: str) -> bool:
    """Drop the slot. False if it does not exist. Raises SlotInUseError if another process reads it."""
    with translate_slot_errors(source_name, slot, "drop"):
        return _drop(connection, slot)
