"""Makes the slot of a stream ready to be read. A slot stream is a slot with the subscriptions that read it.

If pgsieve itself evaluates the row filters, it reads a slot with its own publications, the capture publications. After
this step they exist, and the publisher's catalog, by which pgsieve filters, is recorded. The slot exists, and is at the
position of the change log (the table of the slot's messages).

In: a stream, and a session of its publisher
Out: the stream without subscriptions that are refused, the catalog, and the publications with which the slot is read

If `prepare_slot` fails, it drops the publications that it has created. Raises SlotError.
"""

from collections.abc import Sequence
from dataclasses import replace

import psycopg

from pgsieve.assets.steps.log import no_log
from pgsieve.assets.steps.records.catalogs import (
    Catalogs,
    can_publisher_decide,
    read_catalog_with_fingerprint,
)
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.own_versions import (
    list_slot_stream_records,
    read_newest_cuts,
    refuse_put_back_tables,
)
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.slot_consumption.appending import make_peek_options
from pgsieve.assets.steps.slot_consumption.past_filters import publish_set_aside_tables
from pgsieve.assets.steps.slot_consumption.reading import ReadySlot, read_slot_to
from pgsieve.assets.steps.slot_consumption.slot import begin_slot, forget_copies, take_slot
from pgsieve.assets.steps.slot_consumption.two_phase import is_two_phase, recover_prepared_transactions
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.assets.steps.validation.examination import find_locked_tables
from pgsieve.assets.steps.validation.uncaptured import hold_back_uncaptured_tables
from pgsieve.assets.steps.validation.waiting import select_sound_subscriptions
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog
from pgsieve.decoding.publications.routing import CapturePublication
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.alterations import CatalogFingerprint, find_altered_tables
from pgsieve.resources.postgres.capture import drop_publications, ensure_capture_publications
from pgsieve.resources.postgres.confirmation import confirm
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.missing_publications import find_existing_publications
from pgsieve.resources.postgres.peeks import has_changes, peek_query
from pgsieve.resources.postgres.slot import SlotState, read_slot_state, wait_until_free
from pgsieve.resources.postgres.waits import BRIEF_SECONDS, OpenTransactionsError, limit_wait
from pgsieve.resources.postgres.wal import read_flushed_lsn, read_inserted_lsn, read_next_xid


def prepare_slot(
    connection: psycopg.Connection[tuple[object, ...]],
    slot_stream: SlotStream,
    lake: Lake,
    copier: str | None = None,
) -> tuple[SlotStream, Catalog, tuple[str, ...]]:
    """Create the stream's capture publications and slot if they are missing, and record the catalog if it was altered.

    Returns the stream without refused subscriptions, the catalog, and the publications with which the slot is read.

    Tables that pgsieve may not add to the capture publications wait until it may. A lock of another session may keep a
    table out of them, or hide its row filter. Meanwhile the publisher decides which changes each subscription gets. It
    cannot do so for `copier`, the subscription that is about to copy, if pgsieve.yaml defines one of its publications. Then
    this raises OpenTransactionsError or LockedTableError. Raises SlotError if the slot does not fit the change log.
    """
    fingerprint, catalog = read_catalog_with_fingerprint(connection, slot_stream)
    sound_stream, server_catalog = select_sound_subscriptions(connection, slot_stream, catalog)
    if sound_stream != slot_stream:
        fingerprint, catalog = read_catalog_with_fingerprint(connection, sound_stream)
    # If a run was killed, its query goes on until the server notices that.
    wait_until_free(connection, slot_stream.slot)
    state = take_slot(connection, slot_stream, lake)
    records = list_slot_stream_records(lake, slot_stream)
    refuse_put_back_tables(lake, records, read_newest_cuts(lake, slot_stream))
    log_position, catalogs = ChangeLog(lake, slot_stream).read_position(), Catalogs(lake, sound_stream)
    names, plan, locked = sound_stream.slot_publications(server_catalog), None, frozenset[int]()
    created_names = [name for name in names if name not in server_catalog.publications]
    try:
        must_record = not catalogs.is_recorded(fingerprint)
        was_read = state is not None and log_position is not None and not catalogs.find_unread_subscriptions()
        publisher_decides = (
            was_read and must_record and (copier is None or can_publisher_decide(sound_stream, copier))
        )
        if slot_stream.filtered:
            publish_set_aside_tables(connection, sound_stream, lake, server_catalog, no_log)
        else:
            names, plan, locked = _make_capture(
                connection, sound_stream, server_catalog, names, publisher_decides=publisher_decides
            )
            must_record &= plan is not None
            _hold_back_removed_tables(connection, catalogs, fingerprint, catalog, plan, state)
        if must_record:  # The catalog that is recorded has to include the new capture publications.
            fingerprint, catalog = read_catalog_with_fingerprint(connection, sound_stream)
            must_record = not _has_hidden_filter(sound_stream, catalog, publisher_decides=publisher_decides)
        begin = read_inserted_lsn(connection), read_next_xid(connection)
        if state is None:
            begin_slot(connection, slot_stream, lake)
        else:
            _align_positions(connection, slot_stream, lake, state, log_position, names)
        if plan is not None:
            hold_back_uncaptured_tables(sound_stream, lake, catalog, None if must_record else plan, locked)
        if must_record:
            if log_position is not None and connection.info.server_version < 180000:
                _read_older_wal(connection, slot_stream, lake, names)
            _record_catalog(catalogs, fingerprint, catalog, begin, state)
    except Exception:
        if not slot_stream.filtered:
            drop_publications(connection, slot_stream.source.name, created_names)
        raise
    return sound_stream, server_catalog, names


def _hold_back_removed_tables(
    connection: psycopg.Connection[tuple[object, ...]],
    catalogs: Catalogs,
    fingerprint: CatalogFingerprint,
    catalog: Catalog,
    plan: Sequence[CapturePublication] | None,
    state: SlotState | None,
) -> None:
    """Record that tables which another session has taken out of the capture publications have to be copied.

    They may lack changes even if they are in these publications again. Some subscriptions need no such record: until the
    altered catalog is recorded, the publisher filters their changes with the subscriptions' own publications. It cannot
    filter a prepared transaction that is not committed yet. So with two_phase all subscriptions need the record.

    `catalog` and `fingerprint` were read before this run altered the capture publications. `plan` is None if a lock prevented
    the alteration, and `state` if there is no slot.
    """
    slot_stream, since_xid = catalogs.slot_stream, catalogs.find_xid_before_alteration(fingerprint)
    if state is None or since_xid is None:
        return
    altered_oids = find_altered_tables(connection, slot_stream.capture_names(), since_xid)
    unaltered_tables = [table for table in catalog.tables.values() if table.oid not in altered_oids]
    unaltered_publications = {
        name: publication.list_tables(unaltered_tables)
        for name in slot_stream.capture_names()
        if (publication := catalog.publications.get(name)) is not None
    }
    hold_back_uncaptured_tables(
        replace(slot_stream, subscriptions=_find_undecided_subscriptions(slot_stream, state)),
        catalogs.lake,
        replace(catalog, publications={**catalog.publications, **unaltered_publications}),
        plan,
        locked_oids=catalog.tables.keys() if plan is None else (),
        removed_oids=altered_oids,
    )


def _find_undecided_subscriptions(slot_stream: SlotStream, state: SlotState) -> dict[str, tuple[str, ...]]:
    """Find the subscriptions whose changes the publisher cannot filter, with their publications."""
    return {
        name: publications
        for name, publications in slot_stream.subscriptions.items()
        if is_two_phase(slot_stream, state) or not can_publisher_decide(slot_stream, name)
    }


def hold_back_tables_removed_meanwhile(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> None:
    """Record which tables another session has taken out of the capture publications since `prepare_slot`.

    This must be called after the slot was read, and before its changes are applied. If a run dies in between, the next
    `prepare_slot` does the same.
    """
    state = read_slot_state(connection, slot_stream.slot)
    if slot_stream.filtered or state is None or not _find_undecided_subscriptions(slot_stream, state):
        return
    fingerprint, catalog = read_catalog_with_fingerprint(connection, slot_stream)
    catalog = slot_stream.with_defined_publications(catalog)
    plan = slot_stream.without_missing_publications(catalog).planned_capture(catalog)
    _hold_back_removed_tables(connection, Catalogs(lake, slot_stream), fingerprint, catalog, plan, state)


def _record_catalog(
    catalogs: Catalogs,
    fingerprint: CatalogFingerprint,
    catalog: Catalog,
    begin: tuple[int, int],
    state: SlotState | None,
) -> None:
    """Record a catalog.

    - `begin`: the LSN and the transaction identifier (xid) from which on the catalog is valid
    - `state`: the state of the slot; None if the slot was just created
    """
    # While a subscription was missing in pgsieve.yaml, its tables got no changes, so they are copied again.
    forget_copies(catalogs.lake, catalogs.find_unread_subscriptions())
    restart_lsn = begin[0] if state is None else state.restart_lsn
    catalogs.append(*begin, fingerprint, catalog, restart_lsn)
    # pgsieve filters all later changes by this record, so it is synced to disk before the slot is read.
    catalogs.lake.access.make_durable()
    reach(Failpoint.CATALOG_RECORDED)


def _align_positions(
    connection: psycopg.Connection[tuple[object, ...]],
    slot_stream: SlotStream,
    lake: Lake,
    state: SlotState,
    log_position: int | None,
    publication_names: tuple[str, ...],
) -> None:
    """Bring a slot that exists and the change log to the same position. `log_position` is that of the change log."""
    if log_position is not None:
        if is_two_phase(slot_stream, state):
            recover_prepared_transactions(
                slot_stream, lake, publication_names, connection.info.server_version, log_position
            )
        options = make_peek_options(slot_stream, publication_names)
        confirm(
            connection, slot_stream.source, slot_stream.slot, log_position, options, lake.access.make_durable
        )
    else:  # The process that has created the slot has died before it recorded the position.
        if is_two_phase(slot_stream, state):
            PreparedTransactions(lake, slot_stream).begin(state.confirmed_lsn)
        ChangeLog(lake, slot_stream).record_position(state.confirmed_lsn)


def ensure_publications(
    connection: psycopg.Connection[tuple[object, ...]],
    slot_stream: SlotStream,
    lake: Lake,
    catalog: Catalog,
    publications: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the publications with which a stream is read.

    The replication protocol needs at least one. If nothing is captured, for example because only sequences are
    published, an empty publication is created.
    """
    if publications:
        return publications
    empty_publication = CapturePublication("", OPERATIONS, via_root=False, tables=())
    names = ensure_capture_publications(
        connection, slot_stream.source.name, slot_stream.capture, [empty_publication], catalog
    ).names
    # WAL from before a publication existed has to be read without it, as in `_read_older_wal`.
    if connection.info.server_version < 180000:
        slot = ReadySlot(connection, slot_stream, lake, ())
        read_slot_to(slot, read_flushed_lsn(connection), no_log, must_record_position=True)
    # If pgsieve may not create the empty publication, the slot is read with a former capture publication.
    return names or tuple(name for name in slot_stream.capture_names() if name in catalog.publications)


def _make_capture(
    connection: psycopg.Connection[tuple[object, ...]],
    slot_stream: SlotStream,
    catalog: Catalog,
    names: Sequence[str],
    *,
    publisher_decides: bool,
) -> tuple[tuple[str, ...], Sequence[CapturePublication] | None, frozenset[int]]:
    """Create or alter the capture publications as planned.

    Returns those of the names that exist then, the plan, and the oids of the tables that a lock kept in a publication.

    If a lock prevents that, and the publisher can decide meanwhile, None is returned instead of the plan.
    """
    plan = slot_stream.planned_capture(catalog)
    try:
        with limit_wait(slot_stream.source, connection, BRIEF_SECONDS):
            made = ensure_capture_publications(
                connection, slot_stream.source.name, slot_stream.capture, plan, catalog
            )
    except OpenTransactionsError:
        if not publisher_decides:
            raise
        return tuple(name for name in names if name in catalog.publications), None, frozenset()
    reach(Failpoint.CAPTURE_CREATED)
    existing_names = tuple(name for name in names if name in catalog.publications or name in made.names)
    return existing_names, plan, made.locked_oids


def _has_hidden_filter(slot_stream: SlotStream, catalog: Catalog, *, publisher_decides: bool) -> bool:
    """True if a lock hides a row filter, so that the publisher has to filter. Raises LockedTableError if it cannot."""
    catalog = slot_stream.with_defined_publications(catalog)
    errors = [
        error
        for name in slot_stream.subscriptions
        for _, error in find_locked_tables(slot_stream, name, catalog)
    ]
    if errors and not publisher_decides:
        raise errors[0]
    return bool(errors)


def _read_older_wal(
    connection: psycopg.Connection[tuple[object, ...]],
    slot_stream: SlotStream,
    lake: Lake,
    publications: Sequence[str],
) -> None:
    """Read WAL from before some of the capture publications existed, without these publications.

    Before PostgreSQL 18, pgoutput refuses to decode such WAL with them (`find_missing_publications`). A transaction that is
    open now may have made changes before they existed. Once it has committed, the module `unsendable_changes` reads it
    without them.
    """
    target_lsn, version = read_flushed_lsn(connection), connection.info.server_version

    def find_refusal(names: Sequence[str]) -> SourceError | None:
        query = peek_query(
            slot_stream.slot, target_lsn, make_peek_options(slot_stream, names), version, max_messages=1
        )
        try:
            # Whether there are changes does not matter, only whether the server refuses the query.
            has_changes(connection, slot_stream.source.name, slot_stream.slot, query)
        except SourceError as error:
            return error
        return None

    existing_publications, refusal = find_existing_publications(publications, find_refusal)
    if refusal is not None:
        raise refusal
    if len(existing_publications) < len(publications):
        read_slot_to(
            ReadySlot(connection, slot_stream, lake, existing_publications),
            target_lsn,
            no_log,
            must_record_position=True,
        )
