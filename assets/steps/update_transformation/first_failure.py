"""Finds the first transaction with which the transformation of a window fails, by trying it without writing anything.

In: the tables and messages of a window (the part of a slice that is transformed at once)
Out: the LSN at which the transaction ends, which the user can pass to `pgsieve skip`, and the reason

Raises LakeError if the lake itself fails.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.failures import (
    TABLE_ERRORS,
    describe_error,
    describe_error_fully,
    find_first_failing,
    is_damage,
)
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.changes import SentChanges, SliceOfTable
from pgsieve.assets.steps.update_transformation.messages import FIRST_ORDINAL, MessageFilter
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
        failures = self.lake.map_in_parallel(self._of_table, list(self.work.state_by_table))
        return min((failure for failure in failures if failure), default=None)

    def _of_table(self, name: Name) -> tuple[int, str] | None:
        """The first transaction that cannot be transformed for one table, and the reason; None if there is none."""
        try:
            self._try(name)
        except SchemaChangedError:
            return None
        except TABLE_ERRORS as error:
            # If the lake itself has failed, and not only this table, the call raises the error.
            describe_error(self.lake, error)
            commit_lsn = None if is_damage(error) else self.first_of_table(name)
            return (
                None
                if commit_lsn is None
                else (commit_lsn, describe_error_fully(self.lake, error, name, commit_lsn))
            )
        return None

    def first_of_table(self, name: Name) -> int | None:
        """The first transaction with which the transformation of a table fails; None if no change is the cause."""

        def fails(upto: int) -> bool:
            try:
                self._try(name, upto)
            except TABLE_ERRORS as error:
                describe_error(self.lake, error)  # If the lake itself has failed, the error is raised.
                return True
            return False

        work = self.work
        relations = frozenset(
            part.version.relation.relation_id for part in work.relation_versions_by_table.get(name, ())
        )
        choice = MessageFilter(
            after_order=(work.state_by_table[name].lsn, FIRST_ORDINAL), relations=relations
        )
        return find_first_failing(work.messages.apply_filter(choice).read_commit_lsns(), fails)

    def _try(self, name: Name, upto: int | None = None) -> None:
        """Transform the changes of a table without writing them. If `upto` is given, only up to this commit LSN."""
        work = self.work
        state, parts, messages = (
            work.state_by_table[name],
            work.relation_versions_by_table.get(name, ()),
            work.messages,
        )
        assert state.definition is not None
        if upto is not None:
            parts = [part for part in parts if part.version.begin[0] <= upto]
            messages = messages.apply_filter(MessageFilter(before_order=(upto + 1, FIRST_ORDINAL)))
        readings = readings_of(
            self.subscription, messages, parts, (state.lsn, FIRST_ORDINAL), state.definition
        )
        if not readings:
            return
        schema = readings[0].transformation.schema
        slice_of_table = SliceOfTable(work.contents.end, state.definition.key, schema)
        SentChanges(readings, (), slice_of_table).attempt(
            self.lake, state.definition.columns, work.contents.size
        )
