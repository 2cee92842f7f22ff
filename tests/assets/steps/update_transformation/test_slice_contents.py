"""The slices of a change log, and their contents. No JVM."""

from __future__ import annotations

import struct
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from pgsieve.assets.steps.records.catalogs import AlteredSlices
from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.update_transformation.slice_contents import find_slices, read_slice_contents
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.source import Source
from tests.fixtures.lakes import no_session

FEED = SlotStream("shop", Source("shop", ""), "shop", "shop", False, {})
OID = 7
RELATION = struct.pack(">cI", b"R", OID) + b"public\0t\0d" + struct.pack(">h", 1)
RELATION += b"\x01id\0" + struct.pack(">Ii", 23, -1)
INSERT = struct.pack(">cI", b"I", OID) + b"N" + struct.pack(">hci", 1, b"t", 1) + b"1"
TRUNCATE = struct.pack(">ciBI", b"T", 1, 0, OID)


def receive(lake: Lake, end: int, *messages: bytes) -> None:
    """Append a slice to the change log, and nothing else, as a run that dies then."""
    assert lake.delta_rs is not None
    at = {"slice": end, "commit_lsn": end - 1, "commit_time": datetime.now(UTC), "xid": 1, "relation_id": OID}
    rows = [
        {**at, "ordinal": 2 * number, "number": number, "kind": chr(data[0]), "data": data}
        for number, data in enumerate(messages)
    ]
    lake.delta_rs.write(
        lake.paths.change_log("shop"), pa.Table.from_pylist(rows, CHANGE_LOG_SCHEMA), Commit(end)
    )


def test_a_slice_that_is_altered_and_appended_meanwhile_is_left_to_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, catalog = Lake(str(tmp_path), no_session), Catalog({}, {})
    subscription = Subscription("sub", replace(FEED, subscriptions={"sub": ()}))
    receive(lake, 10, RELATION, INSERT)
    read_ends = AlteredSlices.read_ends

    def read_ends_before_another_process_appends(
        altered_slices: AlteredSlices, name: str, max_end: int
    ) -> set[int]:
        ends = read_ends(altered_slices, name, max_end)
        altered_slices.append("sub", 10, 20)
        receive(lake, 20, RELATION, INSERT)
        return ends

    with monkeypatch.context() as patch:
        patch.setattr(AlteredSlices, "read_ends", read_ends_before_another_process_appends)
        assert [end for end, _, _ in find_slices(lake, subscription, catalog, 0)] == [10]
    ((end, slice_subscription, _),) = find_slices(lake, subscription, catalog, 10)
    assert slice_subscription is not None
    assert (end, slice_subscription.slot_stream.filtered) == (20, True)


def test_a_small_slices_contents_are_recreated_without_spark(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path), no_session)
    receive(lake, 10, RELATION, TRUNCATE, INSERT)
    receive(lake, 20, INSERT)
    for _ in range(2):  # the second time the contents are recorded
        contents = read_slice_contents(lake, FEED, 10)
        assert contents.size >= sum(map(len, (RELATION, TRUNCATE, INSERT)))
        assert contents.changed_oids == {OID}
        (version,) = contents.versions[OID]
        assert (version.relation.name, version.begin, version.end) == ("t", (9, 0), None)
        ((at, truncate),) = contents.truncates
        assert (at, tuple(truncate.relation_ids)) == ((9, 2), (OID,))
    assert lake.records.slices(lake.paths.slices("shop"), after_lsn=0) == [10]
