"""Results about a subscription's sequences: their list, and their comparison with the publisher's.

In: values from the lake or from the publisher. Out: dataclasses, for people and as JSON.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgsieve.resources.postgres.sequences import SequenceValue


@dataclass(frozen=True, slots=True)
class ListedSequence:
    """A sequence that a subscription receives, with its value; None if it was never read."""

    schema: str
    name: str
    last_value: int | None
    is_called: bool | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """A sequence's recorded value, and the publisher's.

    `moved` is true if the publisher's value has moved on, which is no difference.
    """

    subscription: str
    schema: str
    name: str
    recorded: int | None
    publisher: int | None
    equal: bool
    moved: bool
    problem: str | None = None


def listed(values: Iterable["SequenceValue"]) -> tuple[ListedSequence, ...]:
    """Sequences in order of their names."""
    sequences = (ListedSequence(v.schema, v.name, v.last_value, v.is_called, v.problem) for v in values)
    return tuple(sorted(sequences, key=lambda each: (each.schema, each.name)))
