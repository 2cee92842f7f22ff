"""Clustering of replicas: puts rows with similar values in some columns into the same files.

A reader that looks for such values can skip the other files.

In: the columns by which a replica is to be clustered (`cluster_by`), and its files
Out: whether the replica has to be clustered now; and a record of its last clustering, in the state of the subscription
     (the newest row of `_subscription`)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, SubscriptionState
from pgsieve.assets.steps.records.table_states import Name

#: A replica is clustered again if at least this share of its bytes is in files newer than its last clustering.
MIN_NEW_SHARE = 0.2

#: The time at which a file was written, in milliseconds, and its size.
FileTimeAndSize = tuple[int, int]


@dataclass(frozen=True)
class Clusterings:
    """For each replica the columns by which it was last clustered, and the time of the newest file that it then had."""

    record: SubscriptionRecord
    _new_clusterings: dict[Name, tuple[tuple[str, ...], int]] = field(default_factory=dict)

    def is_due(self, name: Name, columns: Sequence[str], files: Sequence[FileTimeAndSize]) -> bool:
        """True if a replica with these files has to be clustered now.

        Either it was not clustered by these columns before, or many of its bytes are new.
        """
        last_columns, newest_time = _parse_clusterings(self.record.read_state()).get(name, ((), 0))
        new_bytes = sum(size for time, size in files if time > newest_time)
        return bool(files) and (
            last_columns != tuple(columns) or new_bytes >= MIN_NEW_SHARE * sum(size for _, size in files)
        )

    def note(self, name: Name, columns: Sequence[str], files: Sequence[FileTimeAndSize]) -> None:
        """Note that a replica was clustered by `columns`, and has these files now. `save` records all notes."""
        self._new_clusterings[name] = tuple(columns), max((time for time, _ in files), default=0)

    def save(self) -> None:
        """Record the notes in the state of the subscription."""
        if self._new_clusterings:
            self.record.change_state(self._add_clusterings)

    def _add_clusterings(self, state: SubscriptionState) -> SubscriptionState:
        clusterings = {**_parse_clusterings(state), **self._new_clusterings}
        rows = [[*name, list(columns), newest_time] for name, (columns, newest_time) in clusterings.items()]
        return replace(state, clustered=json.dumps(rows))


def _parse_clusterings(state: SubscriptionState) -> Mapping[Name, tuple[tuple[str, ...], int]]:
    rows = json.loads(state.clustered or "[]")
    return {(schema, table): (tuple(columns), newest_time) for schema, table, columns, newest_time in rows}
