"""A replica with a key never holds the same key twice: the conflicts insert_exists and update_exists.

PostgreSQL documentation, Conflicts.

The subscriber reports them if publications left out the change that freed the key. It retries; pgsieve sets the table aside,
or disables the subscription, before the slice with the conflict. Each test changes the tables of several variants at once, in
slices that are applied in one batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from tests.fixtures.oracle import Rows, Scenario, wait_until
from tests.fixtures.pgsieve_replica import PgsieveReplica

pytestmark = [
    pytest.mark.spark,
    pytest.mark.parametrize(
        "scenario", ["spark", pytest.param("spark large", marks=pytest.mark.long)], indirect=True
    ),
]

_CONFLICT = re.compile(
    r'ERROR:  (conflict detected on relation "public\.(\w+)": conflict=\w+)\n'
    # From 19 on the log has the remote row first, and the key's line names the index.
    r".*DETAIL:  (?:Could not apply remote change: [^\n]*\n\s+)?Key already exists in unique index[^\n]*?(?:\n\s+)?"
    r"[Kk](ey \([^\n]*?\)=\([^\n]*?\))[;,][^\n]*\n"
    r"(?:.*\n)*?.*finished at (\S+)"
)


def _replicas(scenario: Scenario) -> list[PgsieveReplica]:
    return [r for r in scenario.replicas.values() if isinstance(r, PgsieveReplica)]


def _receive(scenario: Scenario) -> None:
    """End a slice in every replica."""
    for replica in _replicas(scenario):
        drain_slot(replica.subscription.slot_stream, replica.lake, [replica.subscription], print)


def _apply(scenario: Scenario) -> list[ApplyResult]:
    results = []
    for replica in _replicas(scenario):
        drain_slot(replica.subscription.slot_stream, replica.lake, [replica.subscription], print)
        transform(replica.subscription, replica.lake, print)
        results.append(apply(replica.subscription, replica.lake, print))
    return results


def _check(
    scenario: Scenario, results: Sequence[ApplyResult], table: str, conflict: str, rows: list[str]
) -> None:
    """Assert that the table is set aside with PostgreSQL's words, and has the rows from before the slice."""
    for replica, result in zip(_replicas(scenario), results, strict=True):
        state = TableStates(replica.lake, "sub").read_newest()["public", table]
        assert state.state == SyncState.SET_ASIDE, (table, state)
        assert state.reason
        assert f'conflict detected on relation "public.{table}": conflict={conflict}' in state.reason
        applied = result.tables["public", table]
        assert (applied.insert_exists, applied.update_exists) == (
            int(conflict.startswith("insert")),
            int(conflict.startswith("update")),
        )
        assert sorted(Rows(replica.rows("public", table)).shown) == rows, table


def test_an_insert_of_a_key_that_the_replica_has_is_a_conflict(
    scenario: Scenario, postgres_version: int
) -> None:
    former = len(_conflicts(scenario))
    # A filter let the key's row in, and the altered filter does not remove it.
    tables = {
        "filtered": "INSERT INTO {0} VALUES (20, 'in', 'x'); UPDATE {0} SET c = 'y' WHERE a = 1",
        "undone": "UPDATE {0} SET c = 'y' WHERE a = 1; DELETE FROM {0} WHERE a = 1",
        "emptied": "UPDATE {0} SET c = 'y' WHERE a = 1; TRUNCATE {0}; INSERT INTO {0} VALUES (1, 'in', 'y')",
        "beside_moves": "UPDATE {0} SET c = 'y' WHERE a = 1; UPDATE {0} SET a = 30 WHERE a = 40",
    }
    for table in tables:
        scenario.tables(
            f"CREATE TABLE {table} (a int PRIMARY KEY, b text, c text); ALTER TABLE {table} REPLICA IDENTITY FULL"
        )
        scenario.publisher(f"INSERT INTO {table} VALUES (1, 'in', 'x'), (2, 'in', 'x'), (40, 'in', 'y')")
    entries = ", ".join(f"{table} WHERE (c = 'x')" for table in tables)
    scenario.publisher(f"CREATE PUBLICATION pub FOR TABLE {entries}")
    scenario.subscribe("pub")
    scenario.check(*tables)
    changed = ", ".join(f"{table} WHERE (c = 'y')" for table in tables)
    scenario.publisher(f"ALTER PUBLICATION pub SET TABLE {changed}")
    for table in tables:
        scenario.publisher(f"INSERT INTO {table} VALUES (3, 'in', 'y')")
    _receive(scenario)
    for table, changes in tables.items():
        scenario.publisher(changes.format(table))
    results = _apply(scenario)
    for table in tables:
        _check(scenario, results, table, "insert_exists", ["1|in|x", "2|in|x", "3|in|y"])
    if postgres_version < 18:  # it reports a violation of the unique index instead
        return
    # The subscriber meets one of the conflicts, retries, and never gets past it.
    wait_until(lambda: len(_conflicts(scenario)) > former, lambda: "the subscriber has no conflict")
    words, table, key, lsn = _conflicts(scenario)[former]
    for replica in _replicas(scenario):
        reason = TableStates(replica.lake, "sub").read_newest()["public", table].reason or ""
        assert words in reason
        assert key in reason
        finished = format_lsn(parse_lsn(lsn))
        assert (
            f"in the transaction finished at {finished}; `pgsieve resync sub public.{table}` copies" in reason
        )


def _conflicts(scenario: Scenario) -> list[tuple[str, str, str, str]]:
    """PostgreSQL's words, the table, key and LSN of each conflict in the subscriber's log (since 18)."""
    return _CONFLICT.findall(scenario.subscriber_server.log_path.read_text(errors="replace"))


def test_an_update_to_a_key_that_the_replica_has_is_a_conflict(scenario: Scenario) -> None:
    tables = {
        "moved": "DELETE FROM {0} WHERE a = 2; UPDATE {0} SET a = 2 WHERE a = 1",
        "moved_on": "DELETE FROM {0} WHERE a = 2; UPDATE {0} SET a = 2 WHERE a = 1; UPDATE {0} SET a = 7 WHERE a = 2",
        "inserted": "INSERT INTO {0} VALUES (5, 'new'); DELETE FROM {0} WHERE a = 2; UPDATE {0} SET a = 2 WHERE a = 5",
    }
    fine = {
        "lost": "DELETE FROM {0} WHERE a = 2; INSERT INTO unpublished VALUES (1); UPDATE {0} SET a = 2 WHERE a = 40",
        "swapped": "UPDATE {0} SET a = 3 WHERE a = 1; UPDATE {0} SET a = 1 WHERE a = 2; UPDATE {0} SET a = 2 WHERE a = 3",
    }
    scenario.tables("CREATE TABLE unpublished (a int)")
    for table in (*tables, *fine):
        scenario.tables(f"CREATE TABLE {table} (a int PRIMARY KEY, b text)")
        scenario.publisher(f"INSERT INTO {table} VALUES (1, 'old'), (2, 'old')")
    scenario.publisher(
        f"CREATE PUBLICATION pub FOR TABLE {', '.join((*tables, *fine))} WITH (publish = 'insert, update')"
    )
    scenario.subscribe("pub")
    for table in tables:
        scenario.publisher(f"INSERT INTO {table} VALUES (3, 'new')")
    scenario.publisher(
        "ALTER PUBLICATION pub SET (publish = 'update'); INSERT INTO lost VALUES (40, 'unknown');"
        "ALTER PUBLICATION pub SET (publish = 'insert, update')"
    )
    _receive(scenario)
    for table, changes in fine.items():
        scenario.publisher(changes.format(table))
    scenario.check(expect={"lost": ["1|old", "2|old"], "swapped": ["1|old", "2|old"]})
    for table, changes in tables.items():
        scenario.publisher(changes.format(table))
    results = _apply(scenario)
    for table in tables:
        _check(scenario, results, table, "update_exists", ["1|old", "2|old", "3|new"])


@pytest.mark.drawn
def test_a_conflict_disables_the_subscription_before_its_slice(
    scenario: Scenario,
) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text); CREATE TABLE notes (a int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO t VALUES (1, 'old'); CREATE PUBLICATION pub FOR TABLE t, notes WITH (publish = 'insert')"
    )
    scenario.subscribe("pub", disable_on_error=True)
    scenario.publisher("INSERT INTO notes VALUES (1); INSERT INTO t VALUES (2, 'new')")
    _receive(scenario)
    scenario.publisher(
        "DELETE FROM t WHERE a = 1; BEGIN; INSERT INTO notes VALUES (2); INSERT INTO t VALUES (1, 'again'); COMMIT"
    )
    _receive(scenario)
    scenario.publisher("INSERT INTO notes VALUES (3)")
    results = _apply(scenario)
    disabled = f"SELECT subenabled FROM pg_subscription WHERE subname = '{scenario.name}'"
    wait_until(lambda: scenario.subscriber(disabled) == [("f",)], lambda: "the subscription is not disabled")
    assert scenario.builtin is not None
    for each_replica in (scenario.builtin, *_replicas(scenario)):
        assert sorted(Rows(each_replica.rows("public", "t")).shown) == ["1|old", "2|new"]
        assert Rows(each_replica.rows("public", "notes")).shown == ["1"]
    for replica, result in zip(_replicas(scenario), results, strict=True):
        state = SubscriptionRecord(replica.lake, "sub").read_state()
        assert not state.enabled
        assert 'conflict detected on relation "public.t": conflict=insert_exists' in (state.reason or "")
        assert "Key (a)=(1), in the transaction finished at" in (state.reason or "")
        assert result.tables["public", "t"].insert_exists == 1
        assert TableStates(replica.lake, "sub").read_newest()["public", "t"].state == SyncState.READY


@pytest.mark.drawn
def test_a_key_may_be_used_again_once_its_row_is_gone(scenario: Scenario) -> None:
    keys = {
        "int": "i",
        "text": "'key ' || i || repeat('x', 70 * (i % 2))",
        "date": "date '2000-01-01' + i",
        "timestamp": "timestamp '2000-01-01 00:00:00.000001' + i * interval '1 us'",
        "timestamptz": "timestamptz 'epoch' + i * interval '1999 us'",
        "numeric(9,2)": "i / 4.0",
        "uuid": "md5(i::text)::uuid",
        "float8": "i / 3.0",
        "bool": "i = 1",
        "bytea": "int4send(i)",
    }
    tables = {f"by_{n}": pair for n, pair in enumerate(keys.items())}
    for table, (kind, key) in tables.items():
        scenario.tables(f"CREATE TABLE {table} (a int, k {kind} PRIMARY KEY)")
        scenario.publisher(f"INSERT INTO {table} SELECT i, {key} FROM generate_series(1, 2) i")
    scenario.tables("CREATE TABLE pairs (a int, b text, c int, PRIMARY KEY (b, a))")
    scenario.publisher("INSERT INTO pairs VALUES (1, 'x', 1), (2, 'x', 1)")
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO pairs VALUES (1, 'y', 2), (3, 'x', 2)")
    for table in tables:
        scenario.publisher(f"DELETE FROM {table} WHERE a = 1")
    _receive(scenario)
    for table, (_, key) in tables.items():
        scenario.publisher(f"INSERT INTO {table} SELECT i + 10, {key} FROM generate_series(1, 1) i")
    scenario.check(*tables, "pairs")
