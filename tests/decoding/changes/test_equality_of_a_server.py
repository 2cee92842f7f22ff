"""Equality of PostgreSQL: the rows that the server puts into one group have the same bytes, and no others."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from pgsieve.decoding.changes.equality import encode_rows, to_comparable
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.tries import drawn_seed

ROWS = 1000
NAN = float("nan")
#: A NaN with other bits.
OTHER_NAN = struct.unpack("<d", struct.pack("<q", 0x7FF8000000000001))[0]
_FLOATS = [0.0, -0.0, NAN, -NAN, OTHER_NAN, float("inf"), float("-inf"), 1.5, 1.5000001, 5e-45, -5e-45]
_TEXTS = ["", " ", "a", "ab", "b", "A", "\x01", "\u00e9", "e\u0301", "1", "1.0"]
#: By the server's type: the type in Arrow, and values from which elements are drawn.
_TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int4": (pa.int32(), [0, 1, -1, 256, 2**31 - 1, -(2**31)]),
    "bool": (pa.bool_(), [True, False]),
    "float4": (pa.float32(), _FLOATS),
    "float8": (pa.float64(), [*_FLOATS, 5e-324, 1.5 + 2**-52]),
    "numeric(12,2)": (pa.decimal128(12, 2), [Decimal(text) for text in ("0.00", "-0.00", "1.00", "1.10", "-1.00")]),
    "text": (pa.string(), _TEXTS),
    "bytea": (pa.binary(), [b"", b"\0", b"\0\0", b"\1", b"a"]),
    "date": (pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(2000, 1, 1)]),
    "timestamptz": (pa.timestamp("us", "UTC"), [datetime(1970, 1, 1, 0, 0, 0, n, tzinfo=UTC) for n in (0, 1)]),
}  # fmt: skip
_LISTS = ("int4", "float8", "text")


def _draw(draw: random.Random, values: list[Any], *, is_list: bool) -> Any:
    if draw.random() < 0.15:
        return None
    if is_list:
        return [_draw(draw, values[:6], is_list=False) for _ in range(draw.randrange(4))]
    return draw.choice(values)


def _group(keys: Iterable[object]) -> list[list[int]]:
    """The numbers of the rows of each group, in order."""
    rows_by_key = defaultdict[object, list[int]](list)
    for number, key in enumerate(keys):
        rows_by_key[key].append(number)
    return sorted(rows_by_key.values())


def test_rows_are_equal_as_the_server_groups_them(publisher_server: EmbeddedServer) -> None:
    draw = random.Random(drawn_seed())
    columns: dict[str, pa.Array] = {}
    values_by_type: dict[str, list[Any]] = {}
    for name, is_list in [*((name, False) for name in _TYPES), *((name, True) for name in _LISTS)]:
        arrow_type, values = _TYPES[name]
        server_type = f"{name}[]" if is_list else name
        drawn = [_draw(draw, values, is_list=is_list) for _ in range(ROWS)]
        values_by_type[server_type] = drawn
        columns[server_type] = pa.array(drawn, pa.list_(arrow_type) if is_list else arrow_type)
    rows = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    names = list(columns)
    # Each column by itself; and pairs and triples of columns, as rows.
    choices = [(name,) for name in names] + [
        tuple(draw.sample(names, draw.choice([2, 3]))) for _ in range(12)
    ]
    with psycopg.connect(publisher_server.conninfo()) as connection:
        definitions = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(name)) for name in names
        )
        connection.execute(sql.SQL("create temp table v (number int, {})").format(definitions))
        with connection.cursor() as cursor, cursor.copy("copy v from stdin (format binary)") as copy:
            copy.set_types(["int4", *(name.replace("(12,2)", "") for name in names)])
            for number, row in enumerate(zip(*values_by_type.values(), strict=True)):
                copy.write_row((number, *row))
        for choice in choices:
            query = sql.SQL("select array_agg(number order by number) from v group by {}")
            server_groups = connection.execute(query.format(sql.SQL(", ").join(map(sql.Identifier, choice))))
            expected = sorted(numbers for (numbers,) in server_groups)
            assert _group(encode_rows(rows.select(choice), unify_zeros=True).to_pylist()) == expected, choice
            if len(choice) == 1:
                comparable = to_comparable(pa.chunked_array([rows[choice[0]]])).combine_chunks()
                assert _group(comparable.dictionary_encode().indices.to_pylist()) == expected, choice
