"""The lake records the template of the replicas' folders. Another template is refused while there may be replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.assets.steps.records.subscription_state import FoldersChangedError, SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.resources.lake.lake import Lake
from tests.fixtures.lakes import no_session


def test_another_template_is_refused_while_there_may_be_replicas(tmp_path: Path) -> None:
    def lake(**folders: str) -> Lake:
        return Lake(str(tmp_path), no_session, template_by_subscription=folders)

    first = SubscriptionRecord(lake(sales="{table}"), "sales")
    # A table that waits for its first copy has no replica.
    states = TableStates(first.lake, "sales")
    states.append([TableState("public", "t", SyncState.INITIALIZE)])
    assert first.require_enabled().enabled
    first.record_folders()
    states.append([TableState("public", "t", SyncState.DATA_SYNC, 1)])
    assert lake().paths.replica("sales", "public", "t") == f"{tmp_path}/sales/t"
    with pytest.raises(FoldersChangedError, match="its replicas are in folders named"):
        SubscriptionRecord(lake(sales="{schema}/{table}"), "sales").require_enabled()
    assert first.require_enabled().folders == "{table}"
    states.append([TableState("public", "t", SyncState.REMOVED)])
    SubscriptionRecord(lake(sales="{schema}/{table}"), "sales").record_folders()
    assert lake().paths.replica("sales", "public", "t") == f"{tmp_path}/sales/public/t"
