"""Results about the sequences of a subscription: a list of them, and a comparison with the publisher's sequences."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgsieve.resources.postgres.sequences import SequenceValue


@dataclass(frozen=True, slots=True)
class ListedSequence:
    """A sequence that a subscription receives. Its value is None if it was never read."""

    schema: str
    name: str
    last_value: int | None
    is_called: bool | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """The value of a sequence that the lake has recorded, and the publisher's value.

    A sequence may move on while it is compared. If the publisher's value is only further on, `moved` is true, and the
    two values count as equal.
    """

    subscription: str
    schema: str
    name: str
    recorded: int | None
    publisher: int | None
    equal: bool
    moved: bool
    problem: str | None = None


def list_sequences(values: Iterable["SequenceValue"]) -> tuple[ListedSequence, ...]:
    """The results for these values, ordered by name."""
    sequences = (
        ListedSequence(value.schema, value.name, value.last_value, value.is_called, value.problem)
        for value in values
    )
    return tuple(sorted(sequences, key=lambda sequence: (sequence.schema, sequence.name)))
