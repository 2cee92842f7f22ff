"""Results about a subscription's sequences: their list, and their comparison with the publisher's sequences."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgsieve.resources.postgres.sequences import SequenceValue


@dataclass(frozen=True, slots=True)
class ListedSequence:
    """A sequence that a subscription receives; its value is None if it was never read."""

    schema: str
    name: str
    last_value: int | None
    is_called: bool | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """A sequence's recorded value, and the publisher's.

    If the publisher's value has only moved on, `moved` is true, and the two count as equal.
    """

    subscription: str
    schema: str
    name: str
    recorded: int | None
    publisher: int | None
    equal: bool
    moved: bool
    problem: str | None = None


def listed_sequences(values: Iterable["SequenceValue"]) -> tuple[ListedSequence, ...]:
    """The sequences with these values, ordered by name."""
    sequences = (ListedSequence(v.schema, v.name, v.last_value, v.is_called, v.problem) for v in values)
    return tuple(sorted(sequences, key=lambda each: (each.schema, each.name)))
