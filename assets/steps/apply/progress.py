"""The progress of a subscription's replicas, read from the lake.

A slice has the changes from one position of the slot to another. To transform it is to decode and filter its changes
for the subscription. A cut is an LSN, and for each replica the Delta version that has exactly the changes before this
LSN.

In: the cuts, the records of transformed slices, the change log (the slot's messages). Out: the LSNs up to which everything
is transformed or applied, and the tables that are ahead of the newest cut. Raises LakeError.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.apply.batch import find_lacking_changes
from pgsieve.assets.steps.apply.row_versions import find_lagging_versions
from pgsieve.assets.steps.apply.table_result import read_heads
from pgsieve.assets.steps.records.catalogs import AlteredSlices
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class ReplicaProgress:
    """The progress of a subscription's replicas."""

    subscription: Subscription
    lake: Lake

    def find_tables_beyond_cut(self) -> set[Name]:
        """Find the tables that have changed since the newest cut: by changes, or because they were copied."""
        lake, subscription = self.lake, self.subscription.name
        cut = Cuts(lake, subscription).read_last()
        slices = TransformedSlices(lake, subscription).read_slices(cut.lsn if cut else 0)
        names = {change.name for changes in slices.values() for change in changes if change.has_changes}
        copied_table_by_path = {}
        for name, state in TableStates(lake, subscription).read_newest().items():
            if state.state != SyncState.READY:
                continue
            if cut is None or name not in cut.tables:
                names.add(name)
            elif not cut.has_state(state):
                copied_table_by_path[lake.paths.replica(subscription, *name)] = name, cut.tables[name]
        with lake.consistent_read(*copied_table_by_path):
            return names | {
                name
                for path, (name, version) in copied_table_by_path.items()
                if lake.records.version(path) != version
            }

    def read_transformed_lsn(self) -> int:
        """Read the LSN at which the last transformed slice ends."""
        return TransformedSlices(self.lake, self.subscription.name).read_position()

    def find_complete_lsn(self, transformed_lsn: int) -> int:
        """Find the LSN up to which no slice is left to transform.

        The caller has read the transformed slices up to `transformed_lsn`. If the change log has no later slice, the LSN
        is the end of the change log. Otherwise it is `transformed_lsn`, even if another process has transformed later
        slices meanwhile.
        """
        lake, slot_stream = self.lake, self.subscription.slot_stream
        change_log_lsn = ChangeLog(lake, slot_stream).read_position() or 0
        if change_log_lsn <= transformed_lsn:
            return change_log_lsn
        has_slices = lake.records.slices(ChangeLog(lake, slot_stream).path, transformed_lsn) or any(
            end > transformed_lsn
            for end in AlteredSlices(lake, slot_stream).read_ends(self.subscription.name, change_log_lsn)
        )
        # A slice may leave the change log once another process has transformed it, and `has_slices` may miss it. So look
        # afterwards whether the transformed slices have advanced.
        is_overtaken = self.read_transformed_lsn() > transformed_lsn
        return transformed_lsn if has_slices or is_overtaken else change_log_lsn

    def find_applied_lsn(self) -> int:
        """Find the LSN before which neither a replica nor a table of versions of rows (`history: scd2`) lacks a change.

        It is the LSN of the newest cut, or the end of a later slice if all changes up to this end are applied.
        """
        lake, name = self.lake, self.subscription.name
        cut = Cuts(lake, name).read_last()
        applied_lsn = cut.lsn if cut else 0
        states = {n: state for n, state in TableStates(lake, name).read_newest().items() if state.is_applied}
        slices = {
            end: [change for change in changes if change.has_changes and change.name in states]
            for end, changes in TransformedSlices(lake, name).read_slices(applied_lsn).items()
        }
        changed_tables = {change.name for changes in slices.values() for change in changes}
        head_by_table = read_heads(lake, name, sorted(changed_tables))
        for end, changes in slices.items():
            if any(
                find_lacking_changes([change], states[change.name], head_by_table[change.name])
                or find_lagging_versions(self.subscription, lake, states[change.name], [change])
                for change in changes
            ):
                return applied_lsn
            applied_lsn = end
        return applied_lsn
