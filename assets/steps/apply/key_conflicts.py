"""Key conflicts: finds a batch's first change that meets a row of its key, before the batch is applied.

So a replica with a key never has two rows of one key. In: a batch's transformed changes of one table, its
replica. Out: nothing, or KeyConflictError as PostgreSQL's conflicts insert_exists and update_exists (section
29.8, CheckAndReportConflict() in src/backend/executor/execReplication.c). All changes of the batch count,
even if a later change or a TRUNCATE undoes them, so it makes no difference where batches end.

The search reads only the keys, and only the replica's files whose statistics allow one of them.
`pgsieve.decoding.changes.net_change` decides.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.apply.applied import Pending
from pgsieve.assets.steps.apply.in_process import FewChanges
from pgsieve.assets.steps.apply.keyed_changes import KeyConflict, keyed_changes
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.records.failures import in_transaction
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.replica_output import shown
from pgsieve.resources.lake.committers import InProcess
from pgsieve.resources.lake.lake import Lake

INSERT_EXISTS, UPDATE_EXISTS = "insert_exists", "update_exists"

_CHANGE = ["slice", "number", "commit_lsn", "ordinal", "operation", "old", "new"]


class KeyConflictError(PgsieveError):
    """A change of the publisher whose key the replica has already; `conflict` is PostgreSQL's name for it.

    `key` maps its columns to their values as PostgreSQL prints them.
    """

    def __init__(
        self, table: tuple[str, str], conflict: str, key: Mapping[str, str], commit_lsn: int
    ) -> None:
        columns, values = ", ".join(key), ", ".join(key.values())
        problem = (
            f'conflict detected on relation "{".".join(table)}": conflict={conflict}:'
            f" Key already exists in the replica, Key ({columns})=({values})"
        )
        super().__init__(in_transaction(problem, commit_lsn), sqlstate="23505")
        self.conflict = conflict
        self.commit_lsn = commit_lsn


@dataclass(frozen=True)
class ConflictSearch:
    """The search for a batch's first conflict: `path` is the replica, `log` its transformed changes.

    A table without a key has no conflicts. If another run has applied the changes meanwhile, they meet their own
    rows: that is no conflict, and the position leaves the write out.
    """

    lake: Lake
    path: str
    log: str
    definition: Definition
    pending: Pending

    def refuse(self, few: FewChanges | None = None) -> None:
        """Raise KeyConflictError if there is a conflict; `few` are the changes, if they have been read."""
        if not self._may_be:
            return
        with self._not_applied():
            changes = self._small() if few is None else few
            self._refuse(self._by_spark() if changes is None else self._locally(changes))

    def refuse_change(self, conflict: KeyConflict | None) -> None:
        """Raise KeyConflictError for a change that meets a row of its key; None stands for no change."""
        if self._may_be:
            with self._not_applied():
                self._refuse(conflict)

    def _refuse(self, conflict: KeyConflict | None) -> None:
        if conflict is not None and conflict.first_lsn >= self._other_key_until:
            values = (shown(column)[0] for column in conflict.key.columns)
            key = dict(zip(self.definition.key, values, strict=True))
            kind = INSERT_EXISTS if conflict.inserts else UPDATE_EXISTS
            raise KeyConflictError(self.pending.name, kind, key, conflict.commit_lsn)

    @property
    def _may_be(self) -> bool:
        return bool(self.definition.key and (self.pending.sent("insert") or self.pending.key_changes))

    @contextmanager
    def _not_applied(self) -> Iterator[None]:
        try:
            yield
        except KeyConflictError:
            # The position is read after the rows: if the replica lacks the changes now, it lacked them before.
            if (self.lake.records.position(self.path) or 0) < self.pending.ends[0]:
                raise

    @property
    def _other_key_until(self) -> int:
        """The LSN up to which changes may have a former key: their rows may repeat a present key."""
        former = self.definition.former
        return former.until if former and former.key != self.definition.key_numbers else 0

    # in this process

    def _small(self) -> FewChanges | None:
        """The changes, where they are few and this process reads the replica's keys."""
        lake, size = self.lake, self.pending.size
        committer = lake.policy.committer(self.path, self.definition.names, size)
        if not isinstance(committer, InProcess):
            return None
        rows = lake.slice_rows(self.log, self.pending.ends, size, columns=_CHANGE, every=True)
        return None if rows is None else FewChanges(rows, committer.local)

    def _locally(self, few: FewChanges) -> KeyConflict | None:
        """The first conflict of few changes, by the replica's keys that matter."""
        key, rows = self.definition.key, few.rows["new"].type
        of_key = pa.schema([rows.field(rows.get_field_index(name)) for name in key])
        keyed = keyed_changes([few.rows], of_key, (), self.pending.ends, self.pending.since)
        assert keyed is not None
        with self.lake.access.refusing(self.path):
            deleted = self.definition.deleted
            present = keyed.present(lambda keys: few.present_keys(self.path, keys, deleted))
        return keyed.net(present)[1]

    def _by_spark(self) -> KeyConflict | None:
        """The first conflict, if only Spark reads the changes and the replica."""
        with self.lake.access.refusing(self.path):
            changes = SparkChanges(self.lake, self.path, self.log, self.definition, self.pending)
            keyed = changes.keyed()
            return keyed.net(changes.present(keyed))[1]
