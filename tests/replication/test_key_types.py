"""Keys of every type find rows across runs: updates, deletes, new inserts and moves.

PostgreSQL documentation, Replica Identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from deltalake import DeltaTable

from pgsieve.decoding.values.replica_output import list_texts
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica

pytestmark = pytest.mark.long

_TYPES = """
    CREATE TYPE mood AS ENUM ('v0', 'v1', 'v2', 'v3', 'v4', 'v5', 'v6'); CREATE DOMAIN code AS varchar(9) CHECK (VALUE <> '');
    CREATE TYPE pair AS (a int, b text)
"""
#: By type, an SQL expression for the n-th of seven keys.
_KEYS = {
    "smallint": "n - 3",
    "int": "n::bigint * 1000000007 % 2147483647",
    "bigint": "n * 1000000000007 - 3000000000021",
    "oid": "4294967295 - n",
    "numeric": "(n - 3) / 7.0",
    "numeric(12,3)": "n / 8.0",
    "numeric(40,2)": "10::numeric ^ 37 + n / 4.0",
    "money": "n * 1.25",
    "text": "repeat('ß', n * 20) || n",
    "varchar(9)": "'v ' || n",
    "char(5)": "'c' || n",
    "name": "'N' || n",
    '"char"': "chr(97 + n)",
    "bytea": "set_byte('\\x00ff00', 1, n)",
    "uuid": "md5(n::text)",
    "date": "CASE n WHEN 0 THEN '-infinity' WHEN 6 THEN 'infinity' ELSE (date '0044-03-15 BC' + n)::text END",
    "timestamp": "CASE n WHEN 0 THEN '-infinity' ELSE (timestamp '0044-03-15 BC' + n * interval '999 us')::text END",
    "timestamptz": "CASE n WHEN 6 THEN 'infinity' ELSE (timestamptz '9999-12-31 23:59:59.999+00' + n * interval '1 ms')::text END",
    "time": "CASE n WHEN 0 THEN '24:00:00' ELSE (time '23:59:59.999999' - n * interval '1 us')::text END",
    "timetz": "'10:00:00+0' || n",
    "interval": "n * interval '1 mon 2 days 03:04:05.006'",
    "inet": "'10.0.0.0/' || 8 + n",
    "cidr": "'::' || n || '/128'",
    "macaddr": "'08:00:2b:01:02:0' || n",
    "macaddr8": "'08:00:2b:01:02:03:04:0' || n",
    "bit(4)": "n::bit(4)",
    "varbit": "repeat('1', n)",
    "pg_lsn": "'16/B374D84' || n",
    "xid8": "18446744073709551615 - n::numeric",
    "jsonb": "jsonb_build_object('a', n, 'b', ARRAY[n])",
    "tsvector": "'fat cat' || n",
    "int4range": "int4range(n, n + 2)",
    "numrange": "numrange(n / 2.0, NULL)",
    "int4multirange": "int4multirange(int4range(n, n + 1), int4range(20, 30))",
    "mood": "'v' || n",
    "code": "'k' || n",
    "pair": "ROW(n, 'a,\"b')::pair",
}
_ROUNDS = (
    "UPDATE {0} SET b = b + 10 WHERE a = 1",
    "INSERT INTO {0} SELECT 4, {1}, 4 FROM (VALUES (4)) v(n); UPDATE {0} SET b = b + 10 WHERE a = 0",
    "DELETE FROM {0} WHERE a = 1; INSERT INTO {0} SELECT 10, {1}, 1 FROM (VALUES (1)) v(n); DELETE FROM {0} WHERE a = 4",
    "INSERT INTO {0} SELECT 20, {1}, 4 FROM (VALUES (4)) v(n); UPDATE {0} SET b = b + 100",
)
#: The rows 2 and 3 move to other keys, and other rows take their keys.
_MOVES = (
    "UPDATE {0} SET k = {1} FROM (VALUES (5)) v(n) WHERE a = 2",
    "INSERT INTO {0} SELECT 30, {1}, 2 FROM (VALUES (2)) v(n); UPDATE {0} SET k = {1} FROM (VALUES (6)) v(n) WHERE a = 3",
    "UPDATE {0} SET k = {1} FROM (VALUES (3)) v(n) WHERE a = 0; INSERT INTO {0} SELECT 40, {1}, 0 FROM (VALUES (0)) v(n)",
    "DELETE FROM {0} WHERE a IN (10, 40); UPDATE {0} SET b = 0 WHERE a IN (0, 3)",
)


def _rows(replica: PgsieveReplica, table: str) -> list[tuple[str | None, ...]]:
    path = replica.lake.paths.replica("sub", "public", table)
    made = DeltaTable(path).to_pyarrow_table()
    return sorted(zip(*(list_texts(column) for column in made.columns), strict=True))


@pytest.mark.parametrize(
    ("scenario", "keys", "rounds"),
    [
        ("driver alone", _KEYS, (*_ROUNDS, *_MOVES)),
        # For moved rows of large batches Spark is needed.
        ("driver large alone", _KEYS, _ROUNDS),
    ],
    indirect=["scenario"],
    ids=["in process", "by files"],
)
def test_rows_are_found_by_keys_of_every_type(
    scenario: Scenario, keys: Mapping[str, str], rounds: Sequence[str]
) -> None:
    scenario.tables(_TYPES)
    tables = {}
    for number, (kind, key) in enumerate(keys.items()):
        table = f"t{number}"
        tables[table] = f"(({key})::text)::{kind}"
        scenario.tables(f"CREATE TABLE {table} (a int, k {kind} PRIMARY KEY, b int)")
        scenario.publisher(f"INSERT INTO {table} SELECT n, {tables[table]}, n FROM generate_series(0, 3) n")
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub")
    assert scenario.builtin is not None
    for statements in ("", *rounds):
        for table, key in tables.items():
            if statements:
                scenario.publisher(statements.format(table, key))
        scenario.run()
        for table, key in tables.items():
            wanted = sorted(scenario.builtin.rows("public", table))
            for name, replica in scenario.replicas.items():
                assert isinstance(replica, PgsieveReplica)
                assert _rows(replica, table) == wanted, (key, name, statements)
