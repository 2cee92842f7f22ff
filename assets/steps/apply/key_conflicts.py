"""Finds key conflicts in a batch of changes before the batch is applied to a replica.

A replica is the copy of a publisher's table in the lake. A batch contains changes of one table, which are applied to its
replica in one commit. A change is in conflict if it gives a row the key of another row. An example is an INSERT of a key
that the replica has already. Because each batch is searched first, a replica with a key never has two rows with the same
key.

In: the changes of a batch, read from the table's change history in the lake; and the replica
Out: nothing. Raises KeyConflictError for the first change that is in conflict.

PostgreSQL calls these conflicts insert_exists and update_exists (PostgreSQL documentation, 29.8 Conflicts;
CheckAndReportConflict() in src/backend/executor/execReplication.c). A conflict counts even if a later change or a
TRUNCATE of the same batch removes the row. Otherwise the result would depend on where one batch ends and the next
begins.

The search reads only these columns of the replica: the key, and the column that marks deleted rows if there is one. By
the files' statistics (the least and the greatest value of a column), it skips files that cannot have any of the keys.
`pgsieve.decoding.changes.net_change` finds the conflict.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pgsieve.assets.steps.apply.keyed_changes import KeyConflict
from pgsieve.assets.steps.apply.merge_rows import ChangesToMerge
from pgsieve.assets.steps.apply.table_result import TableBatch, find_key_alteration_lsn
from pgsieve.assets.steps.records.failures import add_transaction
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.replica_output import list_texts

INSERT_EXISTS, UPDATE_EXISTS = "insert_exists", "update_exists"


class KeyConflictError(PgsieveError):
    """A change gives a row a key that the replica has already.

    It is made from these facts, of which it keeps `conflict_name` and `commit_lsn`:
    - `name`: the schema and the name of the table
    - `conflict_name`: PostgreSQL's name of the conflict, `insert_exists` or `update_exists`
    - `key`: maps each column of the key to its value, as PostgreSQL prints it
    - `commit_lsn`: the commit LSN (position in the WAL) of the transaction that contains the change
    """

    def __init__(
        self, name: tuple[str, str], conflict_name: str, key: Mapping[str, str], commit_lsn: int
    ) -> None:
        columns, values = ", ".join(key), ", ".join(key.values())
        problem = f'conflict detected on relation "{".".join(name)}": conflict={conflict_name}: Key already exists in the replica, Key ({columns})=({values})'
        super().__init__(add_transaction(problem, commit_lsn), sqlstate="23505")
        self.conflict_name = conflict_name
        self.commit_lsn = commit_lsn


@dataclass(frozen=True)
class ConflictSearch:
    """The search for the first conflict of a batch.

    A table without a key has no conflicts.

    Another run may have applied the same changes in the meantime. In that case the replica already has the keys of
    these changes, and that is not a conflict. No error is raised, and the caller goes on to write the batch. Delta
    leaves out this second write, because the replica already has the batch's position (an LSN).
    """

    batch: TableBatch

    def refuse(self, changes: ChangesToMerge[Any]) -> None:
        """Raise KeyConflictError if there is a conflict. `changes` are the changes of the batch."""
        if not self.can_conflict:
            return
        with self._ignore_applied_changes(), self.batch.lake.access.translate_errors(self.batch.path):
            keyed_changes = changes.read_keyed_changes()
            present_keys = changes.find_present_keys(keyed_changes)
            self._refuse(keyed_changes.decide([present_keys.living_numbers], empties_replica=False).conflict)

    def refuse_change(self, conflict: KeyConflict | None) -> None:
        """Raise KeyConflictError for a conflict that the caller has found, or do nothing if `conflict` is None.

        Also does nothing if another run has applied the changes in the meantime.
        """
        if self.can_conflict:
            with self._ignore_applied_changes():
                self._refuse(conflict)

    def _refuse(self, conflict: KeyConflict | None) -> None:
        if conflict is not None and conflict.first_lsn >= find_key_alteration_lsn(self.batch.definition):
            values = (list_texts(column)[0] for column in conflict.key.columns)
            key = dict(zip(self.batch.definition.key, values, strict=True))
            conflict_name = INSERT_EXISTS if conflict.is_insert else UPDATE_EXISTS
            raise KeyConflictError(self.batch.pending.name, conflict_name, key, conflict.commit_lsn)

    @property
    def can_conflict(self) -> bool:
        """Whether a conflict is possible: only an INSERT or an UPDATE of the key gives a row a key."""
        return bool(
            self.batch.definition.key
            and (self.batch.pending.count("insert") or self.batch.pending.key_change_count)
        )

    @contextmanager
    def _ignore_applied_changes(self) -> Iterator[None]:
        try:
            yield
        except KeyConflictError:
            # Read the replica's position again. If it says that the replica lacks the changes even now, the replica
            # lacked them when its rows were read, and the conflict is real.
            if (self.batch.lake.records.position(self.batch.path) or 0) < self.batch.pending.slice_ends[0]:
                raise
