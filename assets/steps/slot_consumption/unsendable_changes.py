"""Reads a slot past changes that the server cannot send, so that one value, row filter or table does not stop the others.

The server cannot send a change, for example, if a row filter fails, if a text has more than 1 GB, or if an output
function fails.

In: a reading of the slot that has ended with an error of the server
Out: slices (changes from one position of the slot to another) up to an LSN from which the slot can be read again

pgoutput sends a transaction as a whole or not at all. So a transaction that cannot be sent is left out, after its
tables were marked as to be copied again. If the row filter or the value fails for the copy, too, the copy sets the
table aside, with a reason of its own.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.slot_consumption.appending import Peek, Reading, append_slices
from pgsieve.assets.steps.slot_consumption.past_filters import (
    find_failing_table_name,
    peek_past_filters,
    publish_set_aside_tables,
)
from pgsieve.assets.steps.slot_consumption.publisher_decisions import (
    append_empty_slice,
    append_publisher_slice,
    make_publisher_peek,
    make_publisher_slot_streams,
    prepare_base_version,
    record_altered_slice,
)
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.decoding.publications.catalog import PublicationError, Table
from pgsieve.decoding.publications.routing import find_routes
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.missing_publications import (
    UNDEFINED_OBJECT_SQLSTATE,
    find_existing_publications,
)
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.slot import find_changed_relations, find_decoding_error
from pgsieve.resources.spool import FileSpool

#: WAL records begin at multiples of this many bytes (MAXALIGN), or after a page header. The second number is the
#: greatest length of a page header.
_RECORD_ALIGNMENT, _MAX_PAGE_HEADER = 8, 40
#: The commit record of a transaction is searched at first within this many bytes after the change.
_FIRST_STEP = 256


def find_refusal(
    connection: psycopg.Connection[Any], peek: Peek, subscription_slot_streams: Sequence[SlotStream], end: int
) -> SourceError | None:
    """The server's error if it cannot send the changes up to `end` to all these streams; None if it can."""
    error_of_capture = find_decoding_error(
        connection, peek.slot_stream.source.name, peek.slot_stream.slot, peek.query(end)
    )
    if error_of_capture is not None:
        return error_of_capture
    errors_of_subscriptions = (
        _refusal(connection, make_publisher_peek(peek, each), end) for each in subscription_slot_streams
    )
    return next((error for error in errors_of_subscriptions if error is not None), None)


def _refusal(connection: psycopg.Connection[Any], reading: Peek, end: int) -> SourceError | None:
    """The server's error if it cannot send the changes up to `end`; None if it can.

    An error about a publication that did not exist at that time is ignored (see `append_publisher_slice`).
    """
    error = find_decoding_error(
        connection, reading.slot_stream.source.name, reading.slot_stream.slot, reading.query(end)
    )
    return None if error is not None and error.sqlstate == UNDEFINED_OBJECT_SQLSTATE else error


@dataclass(frozen=True)
class Fallback:
    """Reads a slot past a change that the server cannot send."""

    connection: psycopg.Connection[Any]
    lake: Lake
    peek: Peek
    log: Log
    prepared: bool

    def read(self, fault: PgsieveError, position: int, end: int) -> int:
        """Append the changes before the first transaction that cannot be sent. If there are none, append that transaction.

        It is appended as far as it can be sent. Returns the new position. The slot is at `position`, and cannot be read
        up to `end`. Raises `fault` if the server can send everything, or nothing at all.
        """
        # It is not proven that a recorded catalog is valid for this slice, so the publisher decides.
        subscription_slot_streams = make_publisher_slot_streams(self.lake, self.peek.slot_stream)

        def refused_before(lsn: int) -> SourceError | None:
            return find_refusal(self.connection, self.peek, subscription_slot_streams, lsn)

        if refused_before(position) is not None:
            raise fault  # Even if there is nothing to send, there is an error. So it is not about a change.
        refusal = refused_before(end)
        if refusal is None:
            raise fault
        if (peek_accepted := peek_past_filters(self.connection, self.peek, self.lake, end)) is not None:
            self._append_captured(peek_accepted, position, end, None)
            return end
        new_position = _last_sendable(
            position, end, _failing_lsn(refusal), lambda lsn: refused_before(lsn) is None
        )
        if new_position > position:
            base = self._base(subscription_slot_streams, position, new_position)
            for each in subscription_slot_streams:
                append_publisher_slice(
                    self.lake,
                    make_publisher_peek(self.peek, each),
                    self.peek.slot_stream,
                    position,
                    new_position,
                )
            self._append_captured(self.peek, position, new_position, base)
        else:
            new_position = min(end, self._lsn_after_commit(position))
            self._append_transaction(refusal, position, new_position, subscription_slot_streams)
        return new_position

    def _find_accepted_peek(self, reading: Peek, end: int) -> Peek | None:
        """A peek with which the server sends everything up to `end`; None if there is none.

        It is `reading` itself, or the same with values in binary format.
        """
        peeks = [reading, replace(reading, options=replace(reading.options, binary=True))]
        return next((peek for peek in peeks if _refusal(self.connection, peek, end) is None), None)

    def _find_captured_peek(self, refusal: SourceError, end: int) -> tuple[Peek | None, list[str]]:
        """A peek with which the server sends the captured changes, or None; and the publications that the peek leaves out.

        These are publications that did not exist at the time of the transaction. Before PostgreSQL 18, the server
        cannot decode a transaction with such publications. Raises `refusal` if a publication does not exist now.
        """
        slot_stream, publications = self.peek.slot_stream, self.peek.options.publications

        def reading(names: Sequence[str]) -> Peek:
            return replace(self.peek, options=replace(self.peek.options, publications=tuple(names)))

        existing, _ = find_existing_publications(
            publications,
            lambda names: find_decoding_error(
                self.connection, slot_stream.source.name, slot_stream.slot, reading(names).query(end)
            ),
        )
        left_out = [name for name in publications if name not in existing]
        if not present_catalog(self.connection).publications.keys() >= {*left_out}:
            raise refusal
        return self._find_accepted_peek(reading(existing), end) if existing else None, left_out

    def _append_captured(self, peek: Peek, begin: int, end: int, base: int | None) -> None:
        """Append the slice from `begin` to `end` to the change log."""
        reading = Reading(peek, begin, [end], with_prepared=self.prepared)
        for _, has_rows in append_slices(self.lake, reading, begin, base):
            if not has_rows:
                ChangeLog(self.lake, peek.slot_stream).record_position(end, begin, base)
        self.log(f"change log of {peek.slot_stream.name} holds everything before {format_lsn(end)}")

    def _base(self, subscription_slot_streams: Sequence[SlotStream], begin: int, end: int) -> int | None:
        """The version that the change log has to have for a slice that other streams get, too (see `prepare_base_version`)."""
        path = ChangeLog(self.lake, self.peek.slot_stream).path
        head = self.lake.records.head(path)
        if (head.position or begin) != begin:
            raise OvertakenError(path)
        return (
            prepare_base_version(self.lake, self.peek.slot_stream, subscription_slot_streams, head, end)
            if subscription_slot_streams
            else None
        )

    def _append_transaction(
        self, refusal: SourceError, begin: int, end: int, subscription_slot_streams: Sequence[SlotStream]
    ) -> None:
        """Append a slice of one transaction, as far as it can be sent.

        Tables that do not get all changes of the transaction are marked as to be copied again.
        """
        slot_stream, lake = self.peek.slot_stream, self.lake
        captured_peek, left_out = self._find_captured_peek(refusal, end)
        peeks = [
            self._find_accepted_peek(make_publisher_peek(self.peek, each), end)
            for each in subscription_slot_streams
        ]
        if captured_peek is None or None in peeks:
            self._refuse_waiting(begin, refusal)
        base = self._base(subscription_slot_streams, begin, end)
        if captured_peek is None and slot_stream.filtered:
            self._set_aside_failing(begin, end)
        changed_relations = None if captured_peek is None else self._changed_relations(captured_peek, end)
        names_to_copy = (
            set() if captured_peek is not None and not left_out else set(slot_stream.subscriptions)
        )
        for each, peek in zip(subscription_slot_streams, peeks, strict=True):
            (name,) = each.subscriptions
            if peek is None:
                names_to_copy.discard(name)
                relations = (
                    None
                    if changed_relations is None
                    else changed_relations | self._published_relations(left_out)
                )
                self._mark_to_copy(name, relations, refusal, begin, end)
                append_empty_slice(lake, each, end)
                record_altered_slice(lake, slot_stream, each, begin, end)
            elif append_publisher_slice(lake, peek, slot_stream, begin, end):
                names_to_copy.discard(name)
        for name in sorted(names_to_copy):
            relations = None if captured_peek is None else self._published_relations(left_out)
            self._mark_to_copy(name, relations, refusal, begin, end)
        if captured_peek is not None:
            self._append_captured(captured_peek, begin, end, base)
            return
        ChangeLog(lake, slot_stream).record_position(end, begin, base)
        if self.prepared:
            with FileSpool() as spool:
                assembler = TransactionAssembler(spool)
                PreparedTransactions(lake, slot_stream).save(
                    assembler, end, PreparedTransactions(lake, slot_stream).restore(assembler)
                )

    def _refuse_waiting(self, begin: int, refusal: SourceError) -> None:
        """Raise an error if transactions are prepared.

        The transaction that cannot be sent may be one of them. It would commit after its tables are copied.
        """
        if not self.prepared:
            return
        rows = self.connection.execute(
            "select gid from pg_prepared_xacts where database = current_database() order by prepared"
        ).fetchall()
        if rows:
            gids = ", ".join(f'"{gid}"' for (gid,) in rows)
            raise SourceError(
                f"{refusal.message}; it may be a prepared transaction, at {format_lsn(begin)}",
                hint=f"COMMIT PREPARED or ROLLBACK PREPARED these first: {gids}; then run again",
                sqlstate=refusal.sqlstate,
            ) from refusal

    def _mark_to_copy(
        self,
        subscription: str,
        changed_relations: Collection[int] | None,
        refusal: SourceError,
        begin: int,
        end: int,
    ) -> None:
        """Mark those tables of a subscription as to be copied again that the transaction may have changed.

        `changed_relations` has the oids of the relations that it has changed. None stands for all relations.
        """
        names = None if changed_relations is None else self._tables(subscription, changed_relations)
        states = TableStates(self.lake, subscription)
        transaction = f"the transaction that commits at {format_lsn(begin)}"
        problem = f"the server did not send {transaction}: {refusal.message}"
        states_to_copy = [
            replace(state, lsn=0)
            if state.state == SyncState.REMOVED
            else replace(state, state=SyncState.INITIALIZE, reason=problem)
            for state in states.newest().values()
            if _takes_changes(state, end) and (names is None or state.name in names)
        ]
        states.append(states_to_copy)
        table_names = ", ".join(quote_qualified(*state.name) for state in states_to_copy) or "no table"
        self.log(f"{subscription}: {problem}; copied again: {table_names}")

    def _set_aside_failing(self, begin: int, end: int) -> None:
        """Set aside the table whose row filter fails, so that its later changes are not read.

        If the table was copied after the transaction, it is not set aside, because the user has corrected its rows. The
        filter may fail even for the correction itself, since the publisher evaluates it for the old rows, too.
        """
        slot_stream, lake = self.peek.slot_stream, self.lake
        (subscription,) = slot_stream.subscriptions
        name, states = (
            find_failing_table_name(self.connection, self.peek, end),
            TableStates(lake, subscription),
        )
        state = None if name is None else states.newest().get(name)
        if state is not None and state.state != SyncState.REMOVED and _takes_changes(state, end):
            problem = (
                f"its row filter fails at the publisher, in the transaction that commits at {format_lsn(begin)}: correct the filter,"
                " or the rows that it fails for"
            )
            states.append([state.with_problem(subscription, problem)])
            self.log(f"{subscription}: {quote_qualified(*state.name)} is set aside: {problem}")
        publish_set_aside_tables(
            self.connection, slot_stream, lake, present_catalog(self.connection), self.log
        )

    def _changed_relations(self, captured: Peek, end: int) -> set[int]:
        """The oids of the relations that the transaction changes."""
        slot_stream = self.peek.slot_stream
        return find_changed_relations(
            self.connection, slot_stream.source.name, slot_stream.slot, captured.query(end)
        )

    def _published_relations(self, publications: Sequence[str]) -> set[int]:
        """The oids of the tables in some publications, and of their partitions."""
        catalog = present_catalog(self.connection)
        subscribed_publications = [catalog.publications[name] for name in publications]
        tables = [
            table
            for table in catalog.tables.values()
            if any(publication.contains(table) for publication in subscribed_publications)
        ]
        return {oid for table in tables for oid in (table.oid, *table.leaves)}

    def _tables(self, subscription: str, changed_relations: Collection[int]) -> set[Name]:
        """The tables of a subscription to which the changed relations belong.

        Both the recorded and the present catalog are used. If a relation is in neither of them, all partitioned tables
        are included.
        """
        slot_stream = self.peek.slot_stream
        newest_record = Catalogs(self.lake, slot_stream).newest()
        names: set[Name] = set()
        partitioned_tables: set[Name] = set()
        relations: set[int] = set()
        for catalog in (
            slot_stream.with_defined_publications(present_catalog(self.connection)),
            *(newest_record or ())[1:],
        ):
            with suppress(PublicationError):
                publications = slot_stream.publications(catalog, subscription)
                relations_by_oid = find_routes(catalog, publications)
                relations |= relations_by_oid.keys()
                names |= {
                    _name(relations_by_oid[oid].publish_as)
                    for oid in changed_relations
                    if oid in relations_by_oid
                }
                partitioned_tables |= {
                    _name(relation.publish_as)
                    for relation in relations_by_oid.values()
                    if relation.publish_as.kind == "p"
                }
        return names if set(changed_relations) <= relations else names | partitioned_tables

    def _lsn_after_commit(self, position: int) -> int:
        """An LSN after the start of the commit record at `position`, and before the start of the next record."""
        row = self.connection.execute("select current_setting('wal_block_size')::int").fetchone()
        assert row is not None
        lsn_in_record = position % row[0]
        return (
            position - lsn_in_record + _MAX_PAGE_HEADER + _RECORD_ALIGNMENT
            if lsn_in_record <= _MAX_PAGE_HEADER
            else _aligned(position) + _RECORD_ALIGNMENT
        )


def _name(table: Table) -> Name:
    return table.schema, table.name


def _aligned(lsn: int) -> int:
    return lsn - lsn % _RECORD_ALIGNMENT


def _failing_lsn(refusal: SourceError) -> int:
    """The LSN of the change that the server could not send, from the context of its error; 0 if it is not there."""
    context = refusal.__cause__.diag.context if isinstance(refusal.__cause__, psycopg.Error) else None
    places = re.findall(r"\b[0-9A-F]{1,8}/[0-9A-F]{1,8}\b", context or "")
    return parse_lsn(places[-1]) if places else 0


def _last_sendable(begin: int, end: int, guess: int, sends: Callable[[int], bool]) -> int:
    """The last LSN up to which the server can send. It can send up to `begin`, and not up to `end`.

    Only LSNs at which a record may begin are tried. `guess` is tried first; if it is right, it is just before the
    result.
    """
    sendable_lsn = _aligned(guess) if begin < _aligned(guess) < end and sends(_aligned(guess)) else begin
    step = _FIRST_STEP
    while sendable_lsn + step < end and sends(sendable_lsn + step):
        sendable_lsn, step = sendable_lsn + step, step * 2
    candidates = range(
        _aligned(sendable_lsn) + _RECORD_ALIGNMENT, min(end, sendable_lsn + step), _RECORD_ALIGNMENT
    )
    unsendable = bisect_left(candidates, True, key=lambda lsn: not sends(lsn))
    return candidates[unsendable - 1] if unsendable else sendable_lsn


def _takes_changes(state: TableState, end: int) -> bool:
    """True if a table needs changes before `end`, because it is copied, or is being copied, at an earlier LSN."""
    return state.lsn < end and (state.is_transformed or state.state == SyncState.DATA_SYNC)
