"""Values of a replica are printed as PostgreSQL prints them, also values beyond Python's range."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from pgsieve.decoding.values.replica_output import list_texts
from pgsieve.decoding.values.types import column_type, convert_text


@pytest.mark.parametrize(
    ("type_oid", "texts"),
    [
        (1082, ["infinity", "-infinity", "0044-03-15 BC", "2026-07-01", "5874897-12-31"]),
        (1114, ["infinity", "-infinity", "0044-03-15 01:02:03 BC", "2026-07-01 00:00:00.5"]),
        (1184, ["infinity", "-infinity", "0044-03-15 01:02:03+00 BC", "20260-07-01 00:00:00+00"]),
        (1182, ["{infinity,NULL}", "{}", '{"0044-03-15 BC"}']),
        (16, ["t", "f"]),
        (17, ["\\x", "\\xdeadbeef"]),
        (23, ["-1", "2147483647"]),
        (25, ["", "text", "null"]),
        (700, ["0.1", "NaN"]),
        (701, ["1e+15", "-0", "Infinity"]),
    ],
)
def test_each_type_is_printed_as_by_its_output_function(type_oid: int, texts: list[str]) -> None:
    kind = column_type(type_oid, -1)
    values = convert_text(pa.array([text.encode() for text in texts], pa.binary()), kind, "c")
    assert list_texts(values) == texts
    assert list_texts(pa.chunked_array([values.slice(1), values.slice(0, 1)])) == [*texts[1:], texts[0]]
    assert list_texts(pa.nulls(1, values.type)) == ["null"]


def test_decimals_have_all_places_of_their_scale() -> None:
    values = pa.array([Decimal("0.0000000001"), Decimal(-2)], pa.decimal128(20, 10))
    assert list_texts(values) == ["0.0000000001", "-2.0000000000"]


def test_empty_columns_have_no_text() -> None:
    assert list_texts(pa.chunked_array([], pa.int32())) == []
