"""A replica is clustered again once enough of it is new. The record says when."""

from __future__ import annotations

from pathlib import Path

from pgsieve.assets.steps.operations.clustering import Clusterings
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.resources.lake.lake import Lake
from tests.fixtures.lakes import no_session

TABLE = ("public", "t")


def test_a_replica_is_due_once_a_fifth_of_it_is_new(tmp_path: Path) -> None:
    record = SubscriptionRecord(Lake(str(tmp_path), no_session), "sales")
    record.disable("a reason that stays")
    clusterings = Clusterings(record)
    assert not clusterings.is_due(TABLE, ("a",), [])
    assert clusterings.is_due(TABLE, ("a",), [(5, 100)])
    clusterings.note(TABLE, ("a",), [(5, 50), (7, 50)])
    clusterings.save()
    later = Clusterings(record)
    assert not later.is_due(TABLE, ("a",), [(5, 50), (7, 50)])
    assert not later.is_due(TABLE, ("a",), [(5, 50), (7, 50), (8, 24)])
    assert later.is_due(TABLE, ("a",), [(5, 50), (7, 50), (8, 25)])
    assert later.is_due(TABLE, ("b",), [(5, 50)])
    later.note(("public", "u"), ("b",), [(9, 1)])
    later.save()
    assert not Clusterings(record).is_due(TABLE, ("a",), [(7, 1)])
    assert record.read_state().reason == "a reason that stays"
