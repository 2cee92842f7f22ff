"""Compares the recorded sequences of a subscription with those of the publisher.

In: a subscription. Out: one `SequenceComparison` per sequence. The publisher's sequence moves on after each
refresh, as with a subscriber of PostgreSQL 19. So a recorded value counts as equal if it is or was the publisher's
value. On PostgreSQL 19 it was if the recorded page LSN is older than the publisher's; on earlier versions if the
publisher's value is beyond the recorded value, in the direction of the increment. A sequence that was not recorded, or
is no longer published, counts as different.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.slot_consumption.sequences import received_sequences
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.postgres.sequences import SequenceValue


@dataclass(frozen=True, slots=True)
class SequenceComparison:
    """A sequence as it was recorded, and as the publisher has it now; None if it is not recorded or not published."""

    schema: str
    name: str
    recorded: SequenceValue | None
    present: SequenceValue | None

    @property
    def problem(self) -> str | None:
        """Why the publisher's value cannot be read; None if it can."""
        return self.present.problem if self.present else None

    @property
    def moved(self) -> bool:
        """Whether the publisher's value has moved on since it was recorded."""
        if self.recorded is None or self.present is None or self.problem or self._is_same:
            return False
        recorded_lsn, present_lsn = self.recorded.page_lsn, self.present.page_lsn
        # A server logs several values of a sequence at once: only the first of them moves the page's LSN.
        return (
            self._is_beyond
            if recorded_lsn is None or present_lsn is None or recorded_lsn == present_lsn
            else recorded_lsn < present_lsn
        )

    @property
    def equal(self) -> bool:
        """Whether the recorded value is or was the publisher's."""
        return self._is_same or self.moved

    @property
    def _is_same(self) -> bool:
        return _place(self.recorded) is not None and _place(self.recorded) == _place(self.present)

    @property
    def _is_beyond(self) -> bool:
        recorded_place, present_place = _place(self.recorded), _place(self.present)
        if recorded_place is None or present_place is None or self.present is None:
            return False
        forwards = (
            present_place[0] - recorded_place[0]
            if self.present.ascending
            else recorded_place[0] - present_place[0]
        )
        return forwards > 0 or (forwards == 0 and present_place[1])


def _place(value: SequenceValue | None) -> tuple[int, bool] | None:
    """The last value and whether it was used; None if that is not known."""
    if value is None or value.last_value is None or value.is_called is None:
        return None
    return value.last_value, value.is_called


def compare_sequences(subscription: Subscription, record: Sequences) -> list[SequenceComparison]:
    """Compare the recorded sequences with the publisher's; empty where none is or was published."""
    # The record is read first: values recorded after the publisher's values are read could be newer than these.
    recorded = record.newest()
    feed = subscription.feed
    with feed.source.connect() as connection:
        sequences_received = received_sequences(connection, feed, subscription.name)
    present = {(value.schema, value.name): value for value in sequences_received}
    names = sorted(recorded.keys() | present.keys())
    return [SequenceComparison(*name, recorded.get(name), present.get(name)) for name in names]
