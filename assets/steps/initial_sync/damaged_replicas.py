"""Room for a copy where the replica is damaged: its log is taken away, and the cuts that would name other rows."""

from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import reason
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.resources.lake.delta.errors import LakeError, again_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import maintenance


def make_room(subscription: str, lake: Lake, name: Name, generation: int) -> None:
    """Let a copy replace a damaged replica: take away logs that cannot be read, and cuts of versions to come.

    The change history of this generation, which goes on after the copy, is begun anew where its log is unreadable. A
    table begun anew, or put back, counts versions again that cuts have named: those cuts would name other rows. Data
    files stay until they are vacuumed. Raises LakeError where a log cannot be taken away.
    """
    path, history = lake.replica(subscription, *name), lake.changes(subscription, *name, generation)
    version, of_history = (_version(lake, each) for each in (path, history))
    newest = -1 if version is None else version
    if any(cut.tables.get(name, -1) > newest for cut in Cuts(lake, subscription).kept()):
        kept = Cuts(lake, subscription).path
        with lake.refusing(kept):
            again_after_conflict(lambda: maintenance(lake, kept).delete("true"))()
    for each, readable_version in ((path, version), (history, of_history)):
        if readable_version is None:
            lake.remove_log(each)


def _version(lake: Lake, path: str) -> int | None:
    """The newest version, -1 where there is no table, None where its log cannot be read."""
    try:
        return lake.records.version(path) if lake.records.exists(path) else -1
    except LakeError as error:
        reason(lake, error)  # Raises where it is the lake that fails.
        return None
