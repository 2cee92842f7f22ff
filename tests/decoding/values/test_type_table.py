"""docs/types.md agrees with the code, and the code's types with those of a real server."""

from __future__ import annotations

import runpy
from pathlib import Path

import psycopg
import pytest

from pgsieve.decoding.values.builtin_types import BOX_ARRAY_OID, BUILTIN_TYPES, DERIVED_TYPES

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_in_the_docs_is_up_to_date() -> None:
    markdown = runpy.run_path(str(ROOT / "scripts" / "type_table.py"))["markdown"]
    assert (ROOT / "docs" / "types.md").read_text(encoding="utf-8") == markdown()


#: oid8 and regdatabase.
OF_19 = {6437, 6490}


@pytest.mark.parametrize("server", ["publisher_server", "publisher_19"])
def test_builtin_types_are_those_of_the_server(server: str, request: pytest.FixtureRequest) -> None:
    """All types that a column can have: base types and ranges of pg_catalog, except those that only PostgreSQL itself writes."""
    with psycopg.connect(request.getfixturevalue(server).conninfo()) as connection:
        rows = connection.execute(
            "SELECT t.oid::int8, t.typarray::int8, coalesce(r.rngsubtype, m.rngtypid, 0)::int8,"
            " format_type(t.oid, NULL), a.typdelim FROM pg_type t LEFT JOIN pg_type a ON a.oid = t.typarray"
            " LEFT JOIN pg_range r ON r.rngtypid = t.oid LEFT JOIN pg_range m ON m.rngmultitypid = t.oid"
            " WHERE t.oid < 12000 AND t.typarray <> 0 AND t.typcategory NOT IN ('C', 'P')"
            " AND t.typname <> 'gtsvector'"
        ).fetchall()
        version = connection.info.server_version
    types = {oid: t for oid, t in BUILTIN_TYPES.items() if version >= 190000 or oid not in OF_19}
    assert {oid: (array, of) for oid, array, of, _, _ in rows} == {
        oid: (t.array_oid, t.subtype_oid) for oid, t in types.items()
    }
    assert [array for _, array, _, _, delimiter in rows if delimiter != ","] == [BOX_ARRAY_OID]
    names = {oid: name.removesuffix(" without time zone") for oid, _, _, name, _ in rows}
    assert names == {oid: t.name.removesuffix("(n)") for oid, t in types.items()}
    assert {DERIVED_TYPES[oid].kind for oid, t in BUILTIN_TYPES.items() if "multirange" in t.name} == {"m"}
