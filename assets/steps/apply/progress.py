"""How far the replicas of a subscription are, as the Delta tables say.

In: the cuts, the records of transformed slices, the change log. Out: the LSNs before which everything is transformed,
or applied, and the tables that the newest cut does not cover. Raises LakeError.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.apply.applied import heads
from pgsieve.assets.steps.apply.batch import lacking_changes
from pgsieve.assets.steps.apply.row_versions import lacking_versions
from pgsieve.assets.steps.records.catalogs import AlteredSlices
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.records.transformed import Transformed
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class ReplicaProgress:
    """How far the replicas of a subscription are."""

    subscription: Subscription
    lake: Lake

    def tables_beyond_cut(self) -> set[Name]:
        """The tables that the newest cut does not cover yet: with changes to apply, or copied since."""
        lake, subscription = self.lake, self.subscription.name
        cut = Cuts(lake, subscription).last()
        waiting = Transformed(lake, subscription).slices(cut.lsn if cut else 0)
        names = {c.name for changes in waiting.values() for c in changes if c.changed}
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
        """The end of the last slice that is transformed."""
        return Transformed(self.lake, self.subscription.name).position()

    def complete_up_to(self, transformed: int) -> int:
        """The LSN before which everything has been transformed: the change log's end, unless it has further slices.

        The caller has read the slices up to `transformed`. Slices that another process has transformed since then are
        not applied.
        """
        lake, feed = self.lake, self.subscription.feed
        durable = ChangeLog(lake, feed).position() or 0
        if durable <= transformed:
            return durable
        waiting = lake.records.slices(ChangeLog(lake, feed).path, transformed) or any(
            end > transformed for end in AlteredSlices(lake, feed).ends(self.subscription.name, durable)
        )
        # This position is read last: a slice that was not transformed before is in the change log, if it exists.
        overtaken = self.transformed_up_to() > transformed
        return transformed if waiting or overtaken else durable

    def applied_up_to(self) -> int:
        """The LSN before which no slice has a change that a replica, or the versions of its rows, lack.

        It is at least the newest cut's LSN, and moves on over later slices that have no such change.
        """
        lake, name = self.lake, self.subscription.name
        cut = Cuts(lake, name).last()
        upto = cut.lsn if cut else 0
        states = {n: s for n, s in TableStates(lake, name).newest().items() if s.applies}
        slices = {
            end: [change for change in changes if change.changed and change.name in states]
            for end, changes in Transformed(lake, name).slices(upto).items()
        }
        changed = {change.name for changes in slices.values() for change in changes}
        present_heads = heads(lake, name, sorted(changed))
        for end, changes in slices.items():
            if any(
                lacking_changes([change], states[change.name], present_heads[change.name])
                or lacking_versions(self.subscription, lake, states[change.name], [change])
                for change in changes
            ):
                return upto
            upto = end
        return upto
