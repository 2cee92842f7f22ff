"""The progress of a subscription's replicas, read from the lake.

In: the cuts, the records of transformed slices, the change log. Out: the LSNs up to which everything is transformed or
applied, and the tables that are ahead of the newest cut. Raises LakeError.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.apply.batch import lacking_changes
from pgsieve.assets.steps.apply.row_versions import find_lacking_versions
from pgsieve.assets.steps.apply.table_result import heads
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

    def tables_beyond_cut(self) -> set[Name]:
        """The tables that have changed since the newest cut: by changes, or because they were copied."""
        lake, subscription = self.lake, self.subscription.name
        cut = Cuts(lake, subscription).last()
        slices = TransformedSlices(lake, subscription).slices(cut.lsn if cut else 0)
        names = {change.name for changes in slices.values() for change in changes if change.has_changes}
        copied = {}
        for name, state in TableStates(lake, subscription).newest().items():
            if state.state != SyncState.READY:
                continue
            if cut is None or name not in cut.tables:
                names.add(name)
            elif not cut.is_after(state):
                copied[lake.paths.replica(subscription, *name)] = name, cut.tables[name]
        with lake.consistent_read(*copied):
            return names | {
                name for path, (name, version) in copied.items() if lake.records.version(path) != version
            }

    def transformed_up_to(self) -> int:
        """The LSN at which the last transformed slice ends."""
        return TransformedSlices(self.lake, self.subscription.name).position()

    def complete_up_to(self, transformed: int) -> int:
        """The LSN up to which no slice is left to transform.

        The caller has read the transformed slices up to the LSN `transformed`. If the change log has no later slice, this
        is the end of the change log. Otherwise it is `transformed`, even if another process has transformed later slices
        meanwhile.
        """
        lake, slot_stream = self.lake, self.subscription.slot_stream
        durable = ChangeLog(lake, slot_stream).position() or 0
        if durable <= transformed:
            return durable
        has_slices = lake.records.slices(ChangeLog(lake, slot_stream).path, transformed) or any(
            end > transformed
            for end in AlteredSlices(lake, slot_stream).read_ends(self.subscription.name, durable)
        )
        # A slice may leave the change log once it is transformed. So the position of the transformed slices is read last:
        # if it is unchanged, no slice has left the change log before `has_slices` was read.
        is_overtaken = self.transformed_up_to() > transformed
        return transformed if has_slices or is_overtaken else durable

    def applied_up_to(self) -> int:
        """The LSN before which no replica and no versions of rows lack a change.

        It is the LSN of the newest cut, or the end of a later slice if all changes up to this end are applied.
        """
        lake, name = self.lake, self.subscription.name
        cut = Cuts(lake, name).last()
        applied = cut.lsn if cut else 0
        states = {n: state for n, state in TableStates(lake, name).newest().items() if state.is_applied}
        slices = {
            end: [change for change in changes if change.has_changes and change.name in states]
            for end, changes in TransformedSlices(lake, name).slices(applied).items()
        }
        changed = {change.name for changes in slices.values() for change in changes}
        present_heads = heads(lake, name, sorted(changed))
        for end, changes in slices.items():
            if any(
                lacking_changes([change], states[change.name], present_heads[change.name])
                or find_lacking_versions(self.subscription, lake, states[change.name], [change])
                for change in changes
            ):
                return applied
            applied = end
        return applied
