"""Compares the recorded sequences of a subscription with those of the publisher.

In: a subscription
Out: a `SequenceComparison` for each sequence

The publisher's sequence moves on after its value was recorded. A subscriber of PostgreSQL 19 falls behind in the same
way. So a recorded value counts as equal if it is the publisher's value, or if the publisher had this value before. On
PostgreSQL 19, the publisher had it before if the recorded LSN of the sequence's page is older than the present one. On
earlier versions, or if the two LSNs are equal, the values decide: the publisher had it before if the present value is
further on in the direction of the increment. A sequence that is not recorded, or that is no longer published, counts as
different.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.slot_consumption.sequences import read_received_sequences
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.postgres.sequences import SequenceValue


@dataclass(frozen=True, slots=True)
class SequenceComparison:
    """A sequence as it was recorded, and as the publisher has it now.

    `recorded_value` is None if the sequence is not recorded, and `present_value` is None if it is not published.
    """

    schema: str
    name: str
    recorded_value: SequenceValue | None
    present_value: SequenceValue | None

    @property
    def problem(self) -> str | None:
        """The reason why the publisher's value cannot be read; None if it can."""
        return self.present_value.problem if self.present_value else None

    @property
    def has_moved(self) -> bool:
        """True if the publisher's value has moved on since it was recorded."""
        if self.recorded_value is None or self.present_value is None or self.problem or self._has_same_value:
            return False
        recorded_lsn, present_lsn = self.recorded_value.page_lsn, self.present_value.page_lsn
        # One WAL record covers several values of a sequence. Only the first of them changes the LSN of the page, so the
        # value may have moved on although the LSN is the same.
        return (
            self._is_further_on
            if recorded_lsn is None or present_lsn is None or recorded_lsn == present_lsn
            else recorded_lsn < present_lsn
        )

    @property
    def is_equal(self) -> bool:
        """True if the recorded value is the publisher's value, or was the publisher's value before."""
        return self._has_same_value or self.has_moved

    @property
    def _has_same_value(self) -> bool:
        return _find_last_value(self.recorded_value) is not None and _find_last_value(
            self.recorded_value
        ) == _find_last_value(self.present_value)

    @property
    def _is_further_on(self) -> bool:
        recorded, present = _find_last_value(self.recorded_value), _find_last_value(self.present_value)
        if recorded is None or present is None or self.present_value is None:
            return False
        distance = present[0] - recorded[0] if self.present_value.ascending else recorded[0] - present[0]
        return distance > 0 or (distance == 0 and present[1])


def _find_last_value(value: SequenceValue | None) -> tuple[int, bool] | None:
    """Find the last value of a sequence, and whether this value was used; None if that is not known."""
    if value is None or value.last_value is None or value.is_called is None:
        return None
    return value.last_value, value.is_called


def compare_sequences(subscription: Subscription, record: Sequences) -> list[SequenceComparison]:
    """Compare the recorded sequences with those of the publisher. Empty if none is recorded or published."""
    # The record is read before the publisher's values. Otherwise a value that was recorded in between could be newer than
    # the publisher's value.
    recorded_by_name = record.read_newest()
    slot_stream = subscription.slot_stream
    with slot_stream.source.connect() as connection:
        published_values = read_received_sequences(connection, slot_stream, subscription.name)
    present_by_name = {(value.schema, value.name): value for value in published_values}
    names = sorted(recorded_by_name.keys() | present_by_name.keys())
    return [
        SequenceComparison(*name, recorded_by_name.get(name), present_by_name.get(name)) for name in names
    ]
