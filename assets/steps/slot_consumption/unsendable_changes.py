"""Reads a slot past changes that the server cannot send, so that one value or row filter does not stop all tables.

The server cannot send a change, for example, if a row filter fails, if a text has more than 1 GB, or if an output
function fails.

In: a peek (a query that reads the slot without confirming anything) that has ended with an error of the server
Out: slices (changes from one position of the slot to another) in the change log (the table of the slot's messages), up
     to an LSN from which the slot can be read again

pgoutput sends a transaction as a whole or not at all. So a transaction that cannot be sent is left out, after its
tables were marked as to be copied again. If the row filter or the value fails for the copy, too, the copy sets the
table aside, with a reason of its own. Such a table gets no more changes until the user has it copied again. A stream is
a slot with the subscriptions that read it.
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
    find_peek_past_filters,
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
from pgsieve.resources.postgres.peeks import find_changed_relations, find_decoding_error
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.spool import FileSpool

#: WAL records begin at multiples of this many bytes (MAXALIGN), or after a page header. The second number is the
#: greatest length of a page header.
_RECORD_ALIGNMENT, _MAX_PAGE_HEADER_BYTES = 8, 40
#: The commit record of a transaction is searched at first within this many bytes after the change.
_FIRST_STEP_BYTES = 256


def find_refusal(
    connection: psycopg.Connection[Any], peek: Peek, subscription_slot_streams: Sequence[SlotStream], end: int
) -> SourceError | None:
    """Find the server's error if it cannot send the changes up to `end`; None if it can.

    The server is asked with the publications of the peek itself, if there are any, and then with those of each of
    `subscription_slot_streams`. Each of these streams has one subscription, and the publisher filters its changes.
    """
    source_name, slot = peek.slot_stream.source.name, peek.slot_stream.slot
    if peek.options.publications and (
        capture_error := find_decoding_error(connection, source_name, slot, peek.query(end))
    ):
        return capture_error
    subscription_errors = (
        _find_refusal_of_peek(connection, make_publisher_peek(peek, subscription_stream), end)
        for subscription_stream in subscription_slot_streams
    )
    return next((error for error in subscription_errors if error is not None), None)


def _find_refusal_of_peek(connection: psycopg.Connection[Any], peek: Peek, end: int) -> SourceError | None:
    """Find the server's error if it cannot send the changes up to `end`; None if it can.

    An error about a publication that did not exist at that time is ignored (see `append_publisher_slice`).
    """
    error = find_decoding_error(
        connection, peek.slot_stream.source.name, peek.slot_stream.slot, peek.query(end)
    )
    return None if error is not None and error.sqlstate == UNDEFINED_OBJECT_SQLSTATE else error


@dataclass(frozen=True)
class Fallback:
    """Reads a slot past a change that the server cannot send."""

    connection: psycopg.Connection[Any]
    lake: Lake
    peek: Peek
    log: Log
    has_two_phase: bool

    def read_past_change(self, fault: PgsieveError, position: int, end: int) -> int:
        """Append the changes before the first transaction that cannot be sent, and return the new position.

        If there are no changes before this transaction, the transaction itself is appended, as far as it can be sent. If
        everything can be sent except the changes of tables that are set aside (`find_peek_past_filters`), all other changes up
        to `end` are appended. The slot is at `position`, and cannot be read up to `end`. Raises `fault` in two cases:
        the server can send everything; or it refuses even a query that has nothing to send.
        """
        # pgsieve cannot filter this slice by the catalog that it has recorded, because nothing proves that this catalog
        # is valid for the slice. So the publisher filters: it decodes the slice once more for each subscription.
        subscription_slot_streams = make_publisher_slot_streams(self.lake, self.peek.slot_stream)

        def find_refusal_before(lsn: int) -> SourceError | None:
            return find_refusal(self.connection, self.peek, subscription_slot_streams, lsn)

        if find_refusal_before(position) is not None:
            raise fault  # Up to here there is nothing to send, and yet there is an error. So no change is its cause.
        refusal = find_refusal_before(end)
        if refusal is None:
            raise fault
        if (accepted_peek := find_peek_past_filters(self.connection, self.peek, self.lake, end)) is not None:
            self._append_captured_changes(accepted_peek, position, end, None)
            return end
        new_position = _find_last_sendable_lsn(
            position, end, _find_failing_lsn(refusal), lambda lsn: find_refusal_before(lsn) is None
        )
        if new_position > position:
            base_version = self._prepare_base_version(subscription_slot_streams, position, new_position)
            for subscription_stream in subscription_slot_streams:
                append_publisher_slice(
                    self.lake,
                    make_publisher_peek(self.peek, subscription_stream),
                    self.peek.slot_stream,
                    position,
                    new_position,
                )
            self._append_captured_changes(self.peek, position, new_position, base_version)
        else:
            new_position = min(end, self._find_lsn_after_commit(position))
            self._append_transaction(refusal, position, new_position, subscription_slot_streams)
        return new_position

    def _find_accepted_peek(self, peek: Peek, end: int) -> Peek | None:
        """Find a peek with which the server sends everything up to `end`; None if there is none.

        The candidates are `peek` itself, and the same with values in binary format.
        """
        peeks = [peek, replace(peek, options=replace(peek.options, binary=True))]
        return next(
            (
                candidate
                for candidate in peeks
                if _find_refusal_of_peek(self.connection, candidate, end) is None
            ),
            None,
        )

    def _find_captured_peek(self, refusal: SourceError, end: int) -> tuple[Peek | None, list[str]]:
        """Find a peek with which the server sends the captured changes; None if there is none.

        Captured changes are those of tables in pgsieve's own publications, with which the slot is read.

        Also returns the publications that the peek leaves out. These publications did not exist at the time of the
        transaction. Before PostgreSQL 18, the server cannot decode a transaction with such publications. Raises
        `refusal` if one of them does not exist now, either.
        """
        slot_stream, publications = self.peek.slot_stream, self.peek.options.publications

        def make_peek(names: Sequence[str]) -> Peek:
            return replace(self.peek, options=replace(self.peek.options, publications=tuple(names)))

        existing_names, _ = find_existing_publications(
            publications,
            lambda names: find_decoding_error(
                self.connection, slot_stream.source.name, slot_stream.slot, make_peek(names).query(end)
            ),
        )
        missing_names = [name for name in publications if name not in existing_names]
        if not read_present_catalog(self.connection).publications.keys() >= {*missing_names}:
            raise refusal
        return self._find_accepted_peek(
            make_peek(existing_names), end
        ) if existing_names else None, missing_names

    def _append_captured_changes(self, peek: Peek, begin: int, end: int, base_version: int | None) -> None:
        """Append the slice from `begin` to `end` to the change log."""
        reading = Reading(peek, begin, [end], records_prepared=self.has_two_phase)
        for _, has_rows in append_slices(self.lake, reading, begin, base_version):
            if not has_rows:
                ChangeLog(self.lake, peek.slot_stream).record_position(end, begin, base_version)
        self.log(f"change log of {peek.slot_stream.name} holds everything before {format_lsn(end)}")

    def _prepare_base_version(
        self, subscription_slot_streams: Sequence[SlotStream], begin: int, end: int
    ) -> int | None:
        """Find the version that the change log must have when the slice from `begin` to `end` is appended to it.

        None if there are no `subscription_slot_streams`. Then only its position must be `begin`.
        """
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
        """Append a slice of one transaction, as far as the transaction can be sent.

        Tables that do not get all changes of the transaction are marked: they have to be copied again.
        """
        slot_stream, lake = self.peek.slot_stream, self.lake
        captured_peek, missing_publications = self._find_captured_peek(refusal, end)
        peeks = [
            self._find_accepted_peek(make_publisher_peek(self.peek, subscription_stream), end)
            for subscription_stream in subscription_slot_streams
        ]
        if captured_peek is None or None in peeks:
            self._refuse_prepared_transactions(begin, refusal)
        base_version = self._prepare_base_version(subscription_slot_streams, begin, end)
        if captured_peek is None and slot_stream.filtered:
            self._set_aside_failing_table(begin, end)
        changed_relation_ids = (
            None if captured_peek is None else self._find_changed_relation_ids(captured_peek, end)
        )
        subscriptions_to_copy = (
            set()
            if captured_peek is not None and not missing_publications
            else set(slot_stream.subscriptions)
        )
        for subscription_stream, peek in zip(subscription_slot_streams, peeks, strict=True):
            (name,) = subscription_stream.subscriptions
            if peek is None:
                subscriptions_to_copy.discard(name)
                relation_ids = (
                    None
                    if changed_relation_ids is None
                    else changed_relation_ids | self._find_published_relation_ids(missing_publications)
                )
                self._mark_to_copy(name, relation_ids, refusal, begin, end)
                append_empty_slice(lake, subscription_stream, end)
                record_altered_slice(lake, slot_stream, subscription_stream, begin, end)
            elif append_publisher_slice(lake, peek, slot_stream, begin, end):
                subscriptions_to_copy.discard(name)
        for name in sorted(subscriptions_to_copy):
            relation_ids = (
                None if captured_peek is None else self._find_published_relation_ids(missing_publications)
            )
            self._mark_to_copy(name, relation_ids, refusal, begin, end)
        if captured_peek is not None:
            self._append_captured_changes(captured_peek, begin, end, base_version)
            return
        ChangeLog(lake, slot_stream).record_position(end, begin, base_version)
        if self.has_two_phase:
            with FileSpool() as spool:
                assembler = TransactionAssembler(spool)
                PreparedTransactions(lake, slot_stream).save(
                    assembler, end, PreparedTransactions(lake, slot_stream).restore(assembler)
                )

    def _refuse_prepared_transactions(self, begin: int, refusal: SourceError) -> None:
        """Raise an error if transactions are prepared.

        The transaction that cannot be sent may be one of them. Its tables would be copied before it commits, so the
        copies would lack its changes.
        """
        if not self.has_two_phase:
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
        changed_relation_ids: Collection[int] | None,
        refusal: SourceError,
        begin: int,
        end: int,
    ) -> None:
        """Mark the tables of a subscription that the transaction may have changed: they have to be copied again.

        `changed_relation_ids` has the oids of the relations that it has changed. None stands for all relations.
        """
        changed_tables = (
            None
            if changed_relation_ids is None
            else self._find_changed_tables(subscription, changed_relation_ids)
        )
        states = TableStates(self.lake, subscription)
        transaction = f"the transaction that commits at {format_lsn(begin)}"
        problem = f"the server did not send {transaction}: {refusal.message}"
        states_to_copy = [
            replace(state, lsn=0)
            if state.state == SyncState.REMOVED
            else replace(state, state=SyncState.INITIALIZE, reason=problem)
            for state in states.read_newest().values()
            if _needs_changes(state, end) and (changed_tables is None or state.name in changed_tables)
        ]
        states.append(states_to_copy)
        table_names = ", ".join(quote_qualified(*state.name) for state in states_to_copy) or "no table"
        self.log(f"{subscription}: {problem}; copied again: {table_names}")

    def _set_aside_failing_table(self, begin: int, end: int) -> None:
        """Set aside the table whose row filter fails, so that its later changes are not read.

        A table that was copied after the transaction is not set aside: its filter did not fail for the copy, so the user
        has corrected the rows. The transaction with that correction may be the one that fails, because the publisher
        evaluates the filter for old rows, too.
        """
        slot_stream, lake = self.peek.slot_stream, self.lake
        (subscription,) = slot_stream.subscriptions
        name, states = (
            find_failing_table_name(self.connection, self.peek, end),
            TableStates(lake, subscription),
        )
        state = None if name is None else states.read_newest().get(name)
        if state is not None and state.state != SyncState.REMOVED and _needs_changes(state, end):
            problem = f"its row filter fails at the publisher, in the transaction that commits at {format_lsn(begin)}: correct the filter, or the rows that it fails for"
            states.append([state.with_problem(subscription, problem)])
            self.log(f"{subscription}: {quote_qualified(*state.name)} is set aside: {problem}")
        publish_set_aside_tables(
            self.connection, slot_stream, lake, read_present_catalog(self.connection), self.log
        )

    def _find_changed_relation_ids(self, captured_peek: Peek, end: int) -> set[int]:
        """Find the oids of the relations that the transaction changes."""
        slot_stream = self.peek.slot_stream
        return find_changed_relations(
            self.connection, slot_stream.source.name, slot_stream.slot, captured_peek.query(end)
        )

    def _find_published_relation_ids(self, publications: Sequence[str]) -> set[int]:
        """Find the oids of the tables in some publications, and of their partitions."""
        catalog = read_present_catalog(self.connection)
        present_publications = [catalog.publications[name] for name in publications]
        tables = [
            table
            for table in catalog.tables.values()
            if any(publication.contains(table) for publication in present_publications)
        ]
        return {oid for table in tables for oid in (table.oid, *table.leaves)}

    def _find_changed_tables(self, subscription: str, changed_relation_ids: Collection[int]) -> set[Name]:
        """Find the tables of a subscription to which the changed relations belong.

        Both the recorded and the present catalog are used. A relation that is in neither of them may be a former
        partition, so all partitioned tables are included.
        """
        slot_stream = self.peek.slot_stream
        newest_record = Catalogs(self.lake, slot_stream).read_newest()
        names: set[Name] = set()
        partitioned_tables: set[Name] = set()
        known_relation_ids: set[int] = set()
        for catalog in (
            slot_stream.with_defined_publications(read_present_catalog(self.connection)),
            *(newest_record or ())[1:],
        ):
            with suppress(PublicationError):
                publications = slot_stream.publications(catalog, subscription)
                relation_by_oid = find_routes(catalog, publications)
                known_relation_ids |= relation_by_oid.keys()
                names |= {
                    _get_name(relation_by_oid[oid].publish_as)
                    for oid in changed_relation_ids
                    if oid in relation_by_oid
                }
                partitioned_tables |= {
                    _get_name(relation.publish_as)
                    for relation in relation_by_oid.values()
                    if relation.publish_as.kind == "p"
                }
        return names if set(changed_relation_ids) <= known_relation_ids else names | partitioned_tables

    def _find_lsn_after_commit(self, position: int) -> int:
        """Find an LSN after the start of the commit record at `position`, and before the start of the next record."""
        row = self.connection.execute("select current_setting('wal_block_size')::int").fetchone()
        assert row is not None
        page_offset = position % row[0]
        return (
            position - page_offset + _MAX_PAGE_HEADER_BYTES + _RECORD_ALIGNMENT
            if page_offset <= _MAX_PAGE_HEADER_BYTES
            else _align_lsn(position) + _RECORD_ALIGNMENT
        )


def _get_name(table: Table) -> Name:
    return table.schema, table.name


def _align_lsn(lsn: int) -> int:
    return lsn - lsn % _RECORD_ALIGNMENT


def _find_failing_lsn(refusal: SourceError) -> int:
    """Find the LSN of the change that the server could not send, in the context of its error; 0 if it is not there."""
    context = refusal.__cause__.diag.context if isinstance(refusal.__cause__, psycopg.Error) else None
    lsn_texts = re.findall(r"\b[0-9A-F]{1,8}/[0-9A-F]{1,8}\b", context or "")
    return parse_lsn(lsn_texts[-1]) if lsn_texts else 0


def _find_last_sendable_lsn(begin: int, end: int, guessed_lsn: int, can_send: Callable[[int], bool]) -> int:
    """Find the last LSN up to which the server can send. It can send up to `begin`, and not up to `end`.

    The result is an LSN at which a record may begin. `guessed_lsn` is tried first. It is the LSN of the change that
    fails. If that is right, the server can send everything up to there: it sends a transaction only at its commit,
    which comes later.
    """
    sendable_lsn = (
        _align_lsn(guessed_lsn)
        if begin < _align_lsn(guessed_lsn) < end and can_send(_align_lsn(guessed_lsn))
        else begin
    )
    step = _FIRST_STEP_BYTES
    while sendable_lsn + step < end and can_send(sendable_lsn + step):
        sendable_lsn, step = sendable_lsn + step, step * 2
    candidates = range(
        _align_lsn(sendable_lsn) + _RECORD_ALIGNMENT, min(end, sendable_lsn + step), _RECORD_ALIGNMENT
    )
    first_unsendable = bisect_left(candidates, True, key=lambda lsn: not can_send(lsn))
    return candidates[first_unsendable - 1] if first_unsendable else sendable_lsn


def _needs_changes(state: TableState, end: int) -> bool:
    """True if a table needs the changes just before `end`: it was copied, or is being copied, at an earlier LSN."""
    return state.lsn < end and (
        state.is_transformed or state.state == SyncState.DATA_SYNC or state.is_being_altered
    )
