"""Finds the first transaction that makes the transformation of a window fail. For that it transforms without writing.

A slice is the changes from one position of the slot to another. Its messages are transformed: decoded and filtered.

In: the tables and messages of a window (the part of a slice that is transformed in one go)
Out: the commit LSN of the transaction, which the user can pass to `pgsieve skip`, and the reason

Raises LakeError if the lake itself fails.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.failures import (
    TABLE_ERRORS,
    describe_error,
    describe_error_fully,
    find_first_failing_commit,
    is_damage,
    is_filter_error,
)
from pgsieve.assets.steps.records.table_states import Name, add_copy_command
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.changes import SentChanges, TableSlice
from pgsieve.assets.steps.update_transformation.messages import FIRST_ORDINAL, MessageFilter, read_commit_lsns
from pgsieve.assets.steps.update_transformation.relation_versions import make_readings
from pgsieve.assets.steps.update_transformation.windows import TableWork, WindowWork, get_relation_ids
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class FailureSearch:
    """Searches for the first transaction with which the transformation of a window fails."""

    subscription: Subscription
    lake: Lake
    work: WindowWork

    def find_first(self) -> tuple[int, str] | None:
        """Find the first transaction that cannot be transformed for some table, and the reason; None if there is none.

        A table that has to be copied again because the publisher altered it, or because files are damaged, does not count.
        """
        failures = self.work.map_tables(self._find_first_of_table)
        return min((failure for failure in failures if failure), default=None)

    def _find_first_of_table(self, name: Name, table: TableWork) -> tuple[int, str] | None:
        """Find the first transaction that cannot be transformed for one table, and the reason; None if there is none."""
        try:
            self._try_table(table)
        except SchemaChangedError:
            return None
        except TABLE_ERRORS as error:
            # If the lake itself has failed, and not only this table, the call raises the error.
            describe_error(self.lake, error)
            commit_lsn = None if is_damage(error) else self.find_failing_commit(table)
            if commit_lsn is None:
                return None
            problem = describe_error_fully(self.lake, error, name, commit_lsn)
            # The transaction that corrects the row fails, too, as the filter is evaluated for its old row. A copy has both.
            if is_filter_error(error):
                problem = add_copy_command(self.subscription.name, name, problem)
            return commit_lsn, problem
        return None

    def find_failing_commit(self, table: TableWork) -> int | None:
        """Find the commit LSN of the first transaction that cannot be transformed; None if no change is the cause."""

        def fails(last_commit_lsn: int) -> bool:
            try:
                self._try_table(table, last_commit_lsn)
            except TABLE_ERRORS as error:
                describe_error(self.lake, error)  # If the lake itself has failed, the error is raised.
                return True
            return False

        message_filter = MessageFilter(
            after_order=(table.state.lsn, FIRST_ORDINAL),
            relations=get_relation_ids(table.relation_versions),
        )
        return find_first_failing_commit(read_commit_lsns(table.messages.apply_filter(message_filter)), fails)

    def _try_table(self, table: TableWork, last_commit_lsn: int | None = None) -> None:
        """Transform the changes of a table without writing them.

        If `last_commit_lsn` is given, later transactions are left out.
        """
        state, relation_versions, messages = table.state, table.relation_versions, table.messages
        assert state.definition is not None
        if last_commit_lsn is not None:
            relation_versions = [
                relation_version
                for relation_version in relation_versions
                if relation_version.version.begin[0] <= last_commit_lsn
            ]
            messages = messages.apply_filter(MessageFilter(before_order=(last_commit_lsn + 1, FIRST_ORDINAL)))
        readings = make_readings(
            self.subscription, relation_versions, (state.lsn, FIRST_ORDINAL), state.definition
        )
        if not readings:
            return
        schema = readings[0].transformation.schema
        table_slice = TableSlice(table.contents.end, state.definition.key, schema)
        changes = SentChanges(messages, readings, (), table_slice)
        changes.count_without_writing(self.lake.policy.choose_runner(table.contents.size))
