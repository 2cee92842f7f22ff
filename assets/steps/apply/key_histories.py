"""The net change of each key, one change after the other: few changes in, what becomes of each key out. Knows no Spark.

The rules are those of `tenures`, and the result is that of `net_change`. A row that moves takes along what it was sent, so
that no chain of moves is followed afterwards.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pgsieve.assets.steps.apply.tenures import ACTIONS, BEGINS, ORIGIN_OF_FIRST, ORIGIN_OF_LATER, ORIGINS
from pgsieve.resources.lake.delta.key_lookup import Key


@dataclass(frozen=True, slots=True)
class KeyedChange:
    """A change by the keys before and after it; the old one is missing where it was not sent. `unsent` names columns."""

    operation: str
    old: Key | None
    new: Key | None
    unsent: Collection[str] = ()

    @property
    def is_move(self) -> bool:
        """Whether it is an UPDATE from one key to another."""
        return self.operation == "update" and self.old is not None and self.old != self.new


@dataclass(frozen=True, slots=True)
class NetChange:
    """What becomes of a key: `action` is upsert, update or delete, as in `net_change`.

    `last` is the place of the change that has the row, `sent` that of the newest value of each column that some change left
    out; a column that is in neither keeps the value of the replica's row with the key `base`. `named` is the place of a
    change that has the key, in `old` or in `new`. `expected`: the replica is expected to have a row of this key.
    """

    action: str
    last: int | None
    sent: Mapping[str, int]
    base: Key | None
    named: tuple[int, str]
    expected: bool


@dataclass(slots=True)
class _Tenure:
    """A holding of a key by one row; `origin` and `base` are those of the row, whatever key it had then."""

    origin: str
    base: Key | None
    sent: dict[str, int] = field(default_factory=dict)
    last: int | None = None
    ended: bool = False


class _History:
    """The present tenure of each key."""

    def __init__(self, present: Collection[Key], columns: Collection[str]) -> None:
        self.present, self.columns = present, columns
        self.tenures: dict[Key, _Tenure] = {}
        self.named: dict[Key, tuple[int, str]] = {}
        self.expected: dict[Key, bool] = {}

    def _name(self, key: Key, place: int, side: str, event: str) -> None:
        if key not in self.named:
            self.named[key], self.expected[key] = (place, side), event not in BEGINS

    def begin(self, key: Key, place: int, event: str, former: _Tenure | None = None) -> _Tenure:
        """Begin a tenure: of a new row, or of the one that comes from another key."""
        self._name(key, place, "new", event)
        tenure = _Tenure(ORIGINS[event], None)
        if former is not None:
            tenure = _Tenure(former.origin, former.base, dict(former.sent))
        self.tenures[key] = tenure
        return tenure

    def present_tenure(self, key: Key, place: int, side: str, event: str) -> _Tenure:
        """The tenure that an event meets which begins none."""
        self._name(key, place, side, event)
        tenure = self.tenures.get(key)
        if tenure is None:
            tenure = _Tenure(ORIGIN_OF_FIRST, key)
        elif tenure.ended:
            tenure = _Tenure(ORIGIN_OF_LATER, None)
        self.tenures[key] = tenure
        return tenure

    def has_row(self, key: Key) -> bool:
        """Whether a key has a row at the moment."""
        tenure = self.tenures.get(key)
        if tenure is None:
            return key in self.present
        if tenure.ended or tenure.origin == ORIGIN_OF_LATER:
            return False
        return tenure.origin != ORIGIN_OF_FIRST or tenure.base in self.present

    def send(self, tenure: _Tenure, change: KeyedChange, place: int) -> None:
        """Take note of what a change sends."""
        tenure.last = place
        tenure.sent.update((name, place) for name in self.columns if name not in change.unsent)


def net_changes(
    changes: Iterable[KeyedChange], present: Collection[Key], columns: Collection[str]
) -> dict[Key, NetChange]:
    """What becomes of each key that the changes name.

    `present` has those keys of the replica among the ones that moves begin with, `columns` are those that some change left
    out. A move that finds no row does nothing, as a DELETE that finds none.
    """
    history = _History(present, columns)
    for place, change in enumerate(changes):
        match change:
            case KeyedChange("insert", _, key) if key is not None:
                history.send(history.begin(key, place, "insert"), change, place)
            case KeyedChange("delete", key, _) if key is not None:
                history.present_tenure(key, place, "old", "delete").ended = True
            case KeyedChange(_, old, new) if change.is_move and old is not None and new is not None:
                has_row = history.has_row(old)
                left = history.present_tenure(old, place, "old", "leave")
                left.ended = True
                if has_row:
                    history.send(history.begin(new, place, "arrive", left), change, place)
            case KeyedChange(_, _, key) if key is not None:
                history.send(history.present_tenure(key, place, "new", "update"), change, place)
    return {
        key: NetChange(
            ACTIONS[tenure.origin, tenure.ended],
            None if tenure.ended else tenure.last,
            tenure.sent,
            tenure.base,
            history.named[key],
            history.expected[key],
        )
        for key, tenure in history.tenures.items()
    }
