"""Finds the first transaction with which the transformation of a window fails, by trying it without writing anything.

In: the tables and messages of a window (the part of a slice that is transformed at once)
Out: the LSN at which the transaction ends, which the user can pass to `pgsieve skip`, and the reason

Raises LakeError if the lake itself fails.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.failures import (
    TABLE_ERRORS,
    first_failing,
    full_reason,
    is_damage,
    reason,
)
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.changes import SentChanges, SliceOfTable
from pgsieve.assets.steps.update_transformation.messages import FIRST, Choice
from pgsieve.assets.steps.update_transformation.relation_versions import readings_of
from pgsieve.assets.steps.update_transformation.windows import WindowWork
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class FailureSearch:
    """Searches for the first transaction with which the transformation of a window fails."""

    subscription: Subscription
    lake: Lake
    work: WindowWork

    def first(self) -> tuple[int, str] | None:
        """The first transaction that cannot be transformed for some table, and the reason; None if there is none."""
        failures = self.lake.map_in_parallel(self._of_table, list(self.work.tables))
        return min((failure for failure in failures if failure), default=None)

    def _of_table(self, name: Name) -> tuple[int, str] | None:
        """The first transaction that cannot be transformed for one table, and the reason; None if there is none."""
        try:
            self._try(name)
        except SchemaChangedError:
            return None
        except TABLE_ERRORS as error:
            # If the lake itself has failed, and not only this table, the call raises the error.
            reason(self.lake, error)
            commit_lsn = None if is_damage(error) else self.first_of_table(name)
            return (
                None if commit_lsn is None else (commit_lsn, full_reason(self.lake, error, name, commit_lsn))
            )
        return None

    def first_of_table(self, name: Name) -> int | None:
        """The first transaction with which the transformation of a table fails; None if no change is the cause."""

        def fails(upto: int) -> bool:
            try:
                self._try(name, upto)
            except TABLE_ERRORS as error:
                reason(self.lake, error)  # If the lake itself has failed, the error is raised.
                return True
            return False

        work = self.work
        relations = frozenset(part.version.relation.relation_id for part in work.parts.get(name, ()))
        choice = Choice(after=(work.tables[name].lsn, FIRST), relations=relations)
        return first_failing(work.messages.chosen(choice).commits(), fails)

    def _try(self, name: Name, upto: int | None = None) -> None:
        """Transform the changes of a table without writing them. If `upto` is given, only up to this commit LSN."""
        work = self.work
        state, parts, messages = work.tables[name], work.parts.get(name, ()), work.messages
        assert state.definition is not None
        if upto is not None:
            parts = [part for part in parts if part.version.begin[0] <= upto]
            messages = messages.chosen(Choice(before=(upto + 1, FIRST)))
        readings = readings_of(self.subscription, messages, parts, (state.lsn, FIRST), state.definition)
        if not readings:
            return
        schema = readings[0].transformation.schema
        slice_of_table = SliceOfTable(work.contents.end, state.definition.key, schema)
        SentChanges(readings, (), slice_of_table).attempt(
            self.lake, state.definition.columns, work.contents.size
        )
