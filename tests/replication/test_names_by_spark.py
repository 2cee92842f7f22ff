"""Columns of one table may have any names, whichever writer writes the rows: no name is read as a path to a field.

PostgreSQL documentation, Identifiers and Key Words.
"""

from __future__ import annotations

import pytest
from psycopg import sql

from tests.fixtures.oracle import Scenario

#: Names of structs and columns that the steps use themselves, and names that look like a field of them, a pattern, or a quote.
# fmt: off
_PLAIN = (
    "s", "s.t", ".", "..", "t", "row", "s.row", "new", "new.s", "old", "old.row", "action", "unchanged", "v0", "*", "x`y", "x`y.z",
    'x"y', "'||1||'", "$HOME$$", "[0]", "_change_type", "_metadata", "__filename", "_delta_log", "é", "e\u0301", "Z" * 63,
)
# fmt: on
#: Each of these names makes Delta map all column names of its table, so that only Spark writes the table.
_MAPPED = (
    " ",
    "a b",
    ",",
    ";",
    "{}",
    "()",
    "new\nline",
    "new\tline",
    "a=b",
    "${HOME}$$",
    "s",
    "s.t",
    ".",
    "row",
    "new",
    "old.s",
    "x`y z",
    'x"y z',
)


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize(
    "scenario", ["spark large", "spark", "driver drawn marking", "committing"], indirect=True
)
def test_odd_column_names_in_one_table_are_replicated_unchanged(scenario: Scenario) -> None:
    """It takes long: Spark writes each table."""
    tables = {"keyless": _PLAIN, "keyless_mapped": _MAPPED, "keyed": _PLAIN, "keyed_mapped": _MAPPED}
    filters = []
    for table, names in tables.items():
        columns = ", ".join(f"{_quoted(name)} text" for name in names)
        key = f", PRIMARY KEY ({', '.join(map(_quoted, names[-9:]))})" if table.startswith("keyed") else ""
        scenario.tables(f"CREATE TABLE {table} (id int, {columns}{key})")
        scenario.publisher(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        passes = " AND ".join(f"{_quoted(name)} <> 'no'" for name in names[::4])
        filters.append(f"{table} WHERE ({passes})")
    scenario.publisher(f"CREATE PUBLICATION pub FOR TABLE {', '.join(filters)}")

    def inserted(table: str, first: int) -> str:
        values = ", ".join(f"'{i} ' || n" for i in range(len(tables[table])))
        return f"INSERT INTO {table} SELECT n, {values} FROM generate_series({first}, {first + 5}) n"

    for table in tables:
        scenario.publisher(inserted(table, 1))
    scenario.subscribe("pub")
    for table, names in tables.items():
        all_of_them = ", ".join(f"{_quoted(name)} = 'new ' || id" for name in names)
        scenario.publisher(
            f"{inserted(table, 11)}; UPDATE {table} SET {all_of_them} WHERE id = 1; DELETE FROM {table} WHERE id = 2;"
            f"UPDATE {table} SET {_quoted(names[4])} = 'no' WHERE id = 3; UPDATE {table} SET {_quoted(names[5])} = 'x' WHERE id = 4"
        )
    contents = scenario.check(*tables)
    assert {table: len(rows) for table, rows in contents.items()} == dict.fromkeys(tables, 10)
