"""Clustering of replicas: rows that are close in some columns come into the same files, so that readers can leave the others out.

In: the columns of a replica's layout, and its files. Out: whether the replica is to be clustered now, and a record of when that was
done, in the subscription's state.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name

#: Once the files that are new since have this part of a replica's bytes, all its rows are clustered again.
NEW_PART = 0.2

#: When a file was written, in milliseconds, and its size.
File = tuple[int, int]


@dataclass(frozen=True)
class Clusterings:
    """When the replicas of a subscription were clustered by which columns, and the time of the newest file of then."""

    record: SubscriptionRecord
    _done: dict[Name, tuple[tuple[str, ...], int]] = field(default_factory=dict)

    def is_due(self, name: Name, by: Sequence[str], files: Sequence[File]) -> bool:
        """Whether a replica of these files is to be clustered now, as it never was, by other columns, or with few of its rows."""
        clustered_by, until = self._kept().get(name, ((), 0))
        new = sum(size for time, size in files if time > until)
        return bool(files) and (clustered_by != tuple(by) or new >= NEW_PART * sum(size for _, size in files))

    def note(self, name: Name, by: Sequence[str], files: Sequence[File]) -> None:
        """Remember that a replica has been clustered, and has these files now."""
        self._done[name] = tuple(by), max((time for time, _ in files), default=0)

    def save(self) -> None:
        """Record what was noted."""
        if self._done:
            kept = [[*name, list(by), until] for name, (by, until) in {**self._kept(), **self._done}.items()]
            self.record.set(replace(self.record.state(), clustered=json.dumps(kept)))

    def _kept(self) -> Mapping[Name, tuple[tuple[str, ...], int]]:
        kept = json.loads(self.record.state().clustered or "[]")
        return {(schema, table): (tuple(by), until) for schema, table, by, until in kept}
