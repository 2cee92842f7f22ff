"""Drains a slot: reads it up to an LSN in a loop. The messages are appended to the change log (a table), then confirmed.

A slice is the changes from one position of the slot to another. A stream is a slot with the subscriptions that read it.

A table is captured if pgsieve's own publications, with which the slot is read, have it.

In: a slot that is ready, and the publications with which it is read
Out: `DrainResult`

A reading is what one query fetches, which may be several slices. Readings become larger as long as they succeed. If a
transient fault of the server (such as a lost connection) ends a reading, it is repeated in smaller parts. If another
process has read the slot meanwhile, this one goes on from there.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.failures import describe_error, is_transient
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.appending import (
    Peek,
    Reading,
    UnprovenError,
    append_slices,
    make_peek_options,
)
from pgsieve.assets.steps.slot_consumption.backlog import SECOND_SESSION_BYTES, Stride, divide_slices
from pgsieve.assets.steps.slot_consumption.publisher_decisions import (
    append_publisher_slice,
    make_publisher_peek,
    make_publisher_slot_streams,
    prepare_base_version,
    read_greatest_end,
)
from pgsieve.assets.steps.slot_consumption.slot import read_present_slot
from pgsieve.assets.steps.slot_consumption.two_phase import is_two_phase, recover_prepared_transactions
from pgsieve.assets.steps.slot_consumption.unsendable_changes import Fallback, find_refusal
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError, OvertakenError
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.confirmation import can_release_wal, confirm
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.peeks import find_transactions_and_relations, find_truncated_relations
from pgsieve.resources.postgres.slot import read_slot_state
from pgsieve.resources.postgres.slot_copy import has_spare_slots

#: The largest number of bytes of WAL in a slice.
SLICE_BYTES = 512 * 1024 * 1024
#: A run that finds nothing to read does not always record and confirm its position. It does so if the WAL has grown by
#: this many bytes since the last time, or if the slot could release so many bytes of WAL.
IDLE_BYTES = 4 * 1024 * 1024

#: A drain fails when other processes have read the slot meanwhile this many times.
_MAX_OVERTAKEN_COUNT = 6


@dataclass(frozen=True)
class DrainResult:
    """The result of a drain.

    The slot was read from `from_lsn` to `to_lsn`. `slices` is the number of slices, and `lag` the slot's lag in bytes; 0
    if it was not measured.
    """

    from_lsn: int
    to_lsn: int
    slices: int
    lag: int


@dataclass(frozen=True)
class ReadySlot:
    """A slot that is ready to be read into a lake: a session of its server, and the publications to read it with.

    `captured_leaf_sets` has the oids of leaf partitions: one set for each root whose leaves are captured. A TRUNCATE of
    such a root looks the same as a TRUNCATE of all its leaves.
    """

    connection: psycopg.Connection[tuple[object, ...]]
    slot_stream: SlotStream
    lake: Lake
    publications: Sequence[str]
    captured_leaf_sets: Sequence[frozenset[int]] = ()


def read_slot_to(
    slot: ReadySlot,
    target_lsn: int,
    log: Log,
    subscriptions: Sequence[Subscription] = (),
    *,
    must_record_position: bool = False,
) -> DrainResult:
    """Append and confirm the transactions that commit before `target_lsn`.

    With `must_record_position`, the position is recorded even if nothing was read. It is also recorded if a table of
    one of the `subscriptions` was copied at a later LSN (`_has_later_copy` says why).
    """
    reader = _SlotReader(slot, target_lsn, log, subscriptions, must_record_position=must_record_position)
    begin_lsn = reader.position
    reader.read()
    return DrainResult(begin_lsn, reader.position, reader.slice_count, lag=0)


class _SlotReader:
    """Reads a slot up to a target, slice by slice, and recovers from faults."""

    def __init__(
        self,
        slot: ReadySlot,
        target_lsn: int,
        log: Log,
        subscriptions: Sequence[Subscription],
        *,
        must_record_position: bool,
    ) -> None:
        self._slot, self._target_lsn, self._log = slot, target_lsn, log
        self._subscriptions, self._must_record_position = subscriptions, must_record_position
        self._connection, self._slot_stream, self._lake = slot.connection, slot.slot_stream, slot.lake
        self._change_log = ChangeLog(slot.lake, slot.slot_stream)
        self._peek = Peek(
            slot.slot_stream,
            slot.slot_stream.source.make_executor_conninfo(),
            make_peek_options(slot.slot_stream, slot.publications),
            slot.connection.info.server_version,
        )
        state, log_position = (
            read_present_slot(slot.connection, slot.slot_stream),
            self._change_log.read_position(),
        )
        #: The LSN before which all transactions are in the change log.
        self.position = state.confirmed_lsn if log_position is None else log_position
        #: The end of the present reading.
        self._end_lsn = self.position
        self.slice_count = self._overtaken_count = 0
        # The validity is read after the target was determined. Otherwise it could miss an alteration before the target.
        self._catalog_validity = Catalogs(slot.lake, slot.slot_stream).find_validity(
            slot.connection, self.position
        )
        self._must_ask_publisher = False
        self._has_two_phase = is_two_phase(slot.slot_stream, state)
        self._stride = Stride(SLICE_BYTES)
        self._may_copy_slot = True

    def read(self) -> None:
        """Append and confirm the transactions that commit before the target."""
        while self.position < self._target_lsn:
            head = self._lake.records.head(self._change_log.path)
            if head.position is not None and head.position > self.position:
                self._continue_from(head.position)
                continue
            try:
                if not self._read_next(head):
                    return
            except UnprovenError:
                self._log(
                    f"the publications were altered after {format_lsn(self.position)}: the server filters the next"
                    " changes, not pgsieve"
                )
                self._must_ask_publisher = True
            except OvertakenError as error:
                self._count_overtaken(error)
                time.sleep(random.uniform(0, 2**self._overtaken_count / 10))  # noqa: S311 - no secret
            except PgsieveError as fault:
                self._recover(fault)
            else:
                continue
            # The slices that were appended before the fault are confirmed. Otherwise they would be read again.
            self._confirm()

    def _continue_from(self, lsn: int) -> None:
        """Go on from the LSN up to which another process has read the slot."""
        if self._has_two_phase:
            recover_prepared_transactions(
                self._slot_stream, self._lake, self._slot.publications, self._peek.server_version, lsn
            )
        self.position = lsn
        self._confirm()

    def _read_next(self, head: TableHead) -> bool:
        """Append and confirm the next slices.

        Returns False if the last slice is empty and ends at the target, and its position need not be recorded.
        """
        begin = self.position
        publisher_decides = self._catalog_validity is None or self._must_ask_publisher
        is_single = publisher_decides or self._has_two_phase or self._lake.is_reached_by_spark_only
        ends = self._stride.next_ends(begin, self._target_lsn, is_single=is_single)
        self._end_lsn = ends[-1]
        publisher_decides = publisher_decides or self._must_publisher_decide()
        subscription_slot_streams = (
            make_publisher_slot_streams(self._lake, self._slot_stream) if publisher_decides else ()
        )
        base_version = None
        if subscription_slot_streams:
            base_version = self._append_publisher_slices(subscription_slot_streams, ends[0], head)
            ends = [self._end_lsn]
        ends_of_second_session = list[int]()
        if not (is_single or subscription_slot_streams) and self._is_second_session_worth_it():
            ends, ends_of_second_session = divide_slices(begin, ends)
        catalog_validity = None if publisher_decides else self._catalog_validity
        reading = Reading(
            self._peek,
            begin,
            ends,
            ends_of_second_session,
            records_prepared=self._has_two_phase,
            catalog_validity=catalog_validity,
        )
        is_continued = self._append_reading(
            reading,
            base_version,
            must_record_position=self._must_record_position or bool(subscription_slot_streams),
        )
        # Confirm all slices of the reading at once, because for each confirmation the server decodes again from
        # restart_lsn.
        if begin < self.position:
            self._confirm()
            reach(Failpoint.SLOT_CONFIRMED)
        if not is_continued:
            return False
        if self.position < self._end_lsn:
            self._log(
                f'the server does not move a copy of the slot "{self._slot_stream.slot}", so one session reads it alone'
            )
            self._may_copy_slot = False
        self._stride.grow()
        self._must_ask_publisher = False
        return True

    def _append_publisher_slices(
        self, subscription_slot_streams: Sequence[SlotStream], end: int, head: TableHead
    ) -> int:
        """Append one slice per subscription, each to its own stream, with the changes that the publisher sends to it.

        Returns the version that the slot's own change log must still have when its slice is appended.
        """
        self._end_lsn = max(end, read_greatest_end(self._lake, subscription_slot_streams))
        # All streams have to get the same slice. So before the first append it is checked that the server can send it.
        if (
            error := find_refusal(self._connection, self._peek, subscription_slot_streams, self._end_lsn)
        ) is not None:
            raise error
        base_version = prepare_base_version(
            self._lake, self._slot_stream, subscription_slot_streams, head, self._end_lsn
        )
        for subscription_stream in subscription_slot_streams:
            peek = make_publisher_peek(self._peek, subscription_stream)
            append_publisher_slice(self._lake, peek, self._slot_stream, self.position, self._end_lsn)
        return base_version

    def _append_reading(
        self, reading: Reading, base_version: int | None, *, must_record_position: bool
    ) -> bool:
        """Append the slices of a reading. Returns False if the last one is empty and its position need not be recorded."""
        slices = (
            append_slices(self._lake, reading, self.position, base_version)
            if self._slot.publications
            else ((end, False) for end in reading.ends)
        )
        for end, has_rows in slices:
            if has_rows:
                self.slice_count += 1
            elif must_record_position or self._must_record_empty_slice(end):
                self._change_log.record_position(end, self.position, base_version)
            else:
                return False
            self._log(f"change log of {self._slot_stream.name} holds everything before {format_lsn(end)}")
            self.position = end
        return True

    def _must_record_empty_slice(self, end: int) -> bool:
        """True if the position after an empty slice has to be recorded."""
        return (
            end < self._target_lsn
            or end - self.position >= IDLE_BYTES
            or can_release_wal(self._connection, self._slot_stream.slot, IDLE_BYTES)
            or _has_later_copy(self._lake, self._subscriptions, self.position)
        )

    def _recover(self, fault: PgsieveError) -> None:
        """Recover from a fault, or raise it.

        After a transient fault, smaller parts are read. If the server cannot send a change, the slot is read around it.
        """
        if isinstance(fault, SourceUnreachableError | LakeError):
            raise fault
        if not is_transient(fault):
            self._read_around(fault)
        elif self._stride.shrink(self._end_lsn - self.position):
            self._log(f"{fault.message}; it is read again in smaller parts, from {format_lsn(self.position)}")
        else:
            raise fault

    def _read_around(self, fault: PgsieveError) -> None:
        """Read the slot past a change that the server cannot send."""
        self._confirm()
        fallback = Fallback(
            self._connection, self._lake, self._peek, self._log, has_two_phase=self._has_two_phase
        )
        try:
            self.position = fallback.read_past_change(fault, self.position, self._end_lsn)
            self.slice_count += 1
        except OvertakenError as error:
            self._count_overtaken(error)

    def _count_overtaken(self, error: OvertakenError) -> None:
        """Count how often another process has read the slot meanwhile. If that is too often, raise the error."""
        self._overtaken_count += 1
        if self._overtaken_count == _MAX_OVERTAKEN_COUNT:
            raise error

    def _confirm(self) -> None:
        make_durable = self._lake.access.make_durable
        slot, options = self._slot_stream.slot, self._peek.options
        confirm(self._connection, self._slot_stream.source, slot, self.position, options, make_durable)

    def _is_second_session_worth_it(self) -> bool:
        """True if a second session may read at the same time, and makes the reading faster.

        A long transaction holds back the slot's restart_lsn. In that case both sessions would mostly decode old WAL, so a
        second session would not help. Failover slots have no second session: they send only WAL that the standbys have
        (PostgreSQL documentation, synchronized_standby_slots), and a temporary copy of the slot would not wait for that.
        """
        size = self._end_lsn - self.position
        if not self._may_copy_slot or size < SECOND_SESSION_BYTES:
            return False
        state = read_slot_state(self._connection, self._slot_stream.slot)
        return (
            state is not None
            and not state.has_failover
            and self.position - state.restart_lsn <= size
            and has_spare_slots(self._connection)
        )

    def _must_publisher_decide(self) -> bool:
        """True if the publisher has to decide which changes of the next slice a subscription gets.

        It has to if the catalog by which pgsieve filters may be wrong for the slice. If only Spark writes the lake, this
        method peeks at the slice to find out. Otherwise `append_slices` finds out, and raises UnprovenError.
        """
        catalog_validity = self._catalog_validity
        if (
            self._lake.is_reached_by_spark_only
            and catalog_validity is not None
            and not catalog_validity.covers_all
        ):
            query = self._peek.query(self._end_lsn)
            xids, relation_ids = find_transactions_and_relations(
                self._connection, self._slot_stream.source.name, self._slot_stream.slot, query
            )
            if not catalog_validity.covers(xids, relation_ids):
                return True
        return self._may_truncate_root()

    def _may_truncate_root(self) -> bool:
        """True if a TRUNCATE names all leaf partitions of a root.

        Only the publisher can say whether it was a TRUNCATE of the root itself.
        """
        if not self._slot.captured_leaf_sets:
            return False
        query = self._peek.query(self._end_lsn)
        truncated_relations_of_slice = find_truncated_relations(
            self._connection, self._slot_stream.source.name, self._slot_stream.slot, query
        )
        return any(
            leaves <= relation_ids
            for relation_ids in truncated_relations_of_slice
            for leaves in self._slot.captured_leaf_sets
        )


def _has_later_copy(lake: Lake, subscriptions: Sequence[Subscription], position: int) -> bool:
    """True if a table was copied at a later LSN. No cut can be written before the position has reached that LSN.

    A cut names a version of each replica; together these versions equal the publisher at one LSN.
    """
    for subscription in subscriptions:
        try:
            states = TableStates(lake, subscription.name).read_newest().values()
        except LakeError as error:
            # If the lake itself has failed, and not only this table, the error is raised.
            describe_error(lake, error)
        else:
            if any(state.state == SyncState.READY and state.lsn > position for state in states):
                return True
    return False
