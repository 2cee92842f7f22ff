"""Key conflicts: finds the first change of a batch whose new key the replica has already, before the batch is applied.

So a replica with a key never has two rows with the same key. In: a batch's transformed changes of one table, and its
replica. Out: nothing, or KeyConflictError for the conflicts insert_exists and update_exists (PostgreSQL documentation,
29.8 Conflicts; CheckAndReportConflict() in src/backend/executor/execReplication.c). A change counts even if a later
change or a TRUNCATE of the batch undoes it, so it does not matter where batches end.

The search reads only keys, and only the files of the replica whose statistics allow one of these keys.
`pgsieve.decoding.changes.net_change` finds the conflict.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.apply.in_process import FewChanges
from pgsieve.assets.steps.apply.keyed_changes import KeyConflict, keyed_changes
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.apply.table_result import PendingChanges, former_key_until
from pgsieve.assets.steps.records.failures import in_transaction
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.replica_output import value_texts
from pgsieve.resources.lake.lake import Lake

INSERT_EXISTS, UPDATE_EXISTS = "insert_exists", "update_exists"

_CHANGE_COLUMNS = ["slice", "number", "commit_lsn", "ordinal", "operation", "old", "new"]


class KeyConflictError(PgsieveError):
    """A change has a new key that the replica has already; `conflict` is PostgreSQL's name of the conflict.

    `key` maps the key's columns to their values as PostgreSQL prints them.
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
    """The search for a batch's first conflict: `path` is the replica, `log` its change history.

    A table without a key has no conflicts. If another run has applied the same changes meanwhile, the replica has their
    keys: that is no conflict, and the replica's position makes the write a no-op.
    """

    lake: Lake
    path: str
    log: str
    definition: Definition
    pending: PendingChanges

    def refuse(self, few_changes: FewChanges | None = None) -> None:
        """Raise KeyConflictError if there is a conflict; `few_changes` are the changes if the caller has read them."""
        if not self._can_conflict:
            return
        with self._unless_applied():
            changes = self._read_few_changes() if few_changes is None else few_changes
            self._refuse(self._find_by_spark() if changes is None else self._find_in_process(changes))

    def refuse_change(self, conflict: KeyConflict | None) -> None:
        """Raise KeyConflictError for a conflict, unless it is None, or another run has applied the changes."""
        if self._can_conflict:
            with self._unless_applied():
                self._refuse(conflict)

    def _refuse(self, conflict: KeyConflict | None) -> None:
        if conflict is not None and conflict.first_lsn >= former_key_until(self.definition):
            values = (value_texts(column)[0] for column in conflict.key.columns)
            key = dict(zip(self.definition.key, values, strict=True))
            kind = INSERT_EXISTS if conflict.inserts else UPDATE_EXISTS
            raise KeyConflictError(self.pending.name, kind, key, conflict.commit_lsn)

    @property
    def _can_conflict(self) -> bool:
        return bool(self.definition.key and (self.pending.count("insert") or self.pending.key_changes))

    @contextmanager
    def _unless_applied(self) -> Iterator[None]:
        try:
            yield
        except KeyConflictError:
            # The position is read after the rows: a replica that lacks the changes now lacked them then.
            if (self.lake.records.position(self.path) or 0) < self.pending.slice_ends[0]:
                raise

    # in this process

    def _read_few_changes(self) -> FewChanges | None:
        """The changes, if they are few and this process can read the replica's keys; otherwise None."""
        lake, size = self.lake, self.pending.size
        committer = lake.policy.in_process(self.path, self.definition.names, size)
        if committer is None:
            return None
        rows = lake.slice_rows(self.log, self.pending.slice_ends, size, columns=_CHANGE_COLUMNS, every=True)
        return None if rows is None else FewChanges(rows, committer)

    def _find_in_process(self, changes: FewChanges) -> KeyConflict | None:
        """The first conflict of few changes, found in this process."""
        key, row_type = self.definition.key, changes.rows["new"].type
        key_columns = pa.schema([row_type.field(row_type.get_field_index(name)) for name in key])
        keyed = keyed_changes([changes.rows], key_columns, (), self.pending.extent)
        assert keyed is not None
        deleted = self.definition.deleted_column
        present = keyed.present(lambda keys: changes.present_keys(self.path, keys, deleted))
        return keyed.decide([present.living], empties=False).conflict

    def _find_by_spark(self) -> KeyConflict | None:
        """The first conflict, found by Spark."""
        with self.lake.access.translate_errors(self.path):
            changes = SparkChanges(self.lake, self.path, self.log, self.definition, self.pending)
            keyed = changes.keyed_changes()
            return keyed.decide([changes.present(keyed).living], empties=False).conflict
