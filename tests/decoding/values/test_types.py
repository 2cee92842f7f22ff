"""PostgreSQL's text and binary formats give exactly the values of their Spark types, or a specific error."""

from __future__ import annotations

import datetime as dt
import math
import pickle
import struct
from decimal import Context, Decimal

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import (
    PgsieveError,
    ProtocolError,
    UnsupportedBinaryError,
    UnsupportedTypeError,
    ValueNotRepresentableError,
)
from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES, ELEMENT_OIDS, DerivedType
from pgsieve.decoding.values.datetimes import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    days_since_epoch,
)
from pgsieve.decoding.values.types import (
    column_type,
    convert_binary,
    convert_copy,
    convert_text,
    copy_expression,
)

BOOL, BYTEA, CHAR, NAME, INT8, INT2, INT4, TEXT, OID = 16, 17, 18, 19, 20, 21, 23, 25, 26
JSON, FLOAT4, FLOAT8, BPCHAR, VARCHAR, DATE, TIMESTAMP, TIMESTAMPTZ = (
    114,
    700,
    701,
    1042,
    1043,
    1082,
    1114,
    1184,
)
INTERVAL, NUMERIC, UUID, JSONB, INT4_ARRAY, NUMERIC_ARRAY, DOMAIN = 1186, 1700, 2950, 3802, 1007, 1231, 16_999

DAY = 86_400_000_000
EXACT = Context(60)
POSTGRES_EPOCH = days_since_epoch(2000, 1, 1)


def numeric(precision: int, scale: int) -> int:
    """The type modifier of numeric(precision, scale): numerictypmodin."""
    return (precision << 16 | scale & 0x7FF) + 4


def text(oid: int, *values: str | None, modifier: int = -1, override: str | None = None) -> list[object]:
    """The values of PostgreSQL's texts; dates and timestamps as their numbers."""
    kind = column_type(oid, modifier, override)
    array = convert_text(
        pa.array([None if v is None else v.encode() for v in values], pa.binary()), kind, "c"
    )
    assert array.type == kind.arrow_type
    array.validate(full=True)
    return numbers(array)


def numbers(array: pa.Array) -> list[object]:
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    elif pa.types.is_date32(array.type):
        array = array.cast(pa.int32())
    return array.to_pylist()


@pytest.mark.parametrize(
    ("oid", "modifier", "arrow", "spark"),
    [
        (BOOL, -1, pa.bool_(), "boolean"),
        (INT2, -1, pa.int16(), "smallint"),
        (INT4, -1, pa.int32(), "int"),
        (INT8, -1, pa.int64(), "bigint"),
        (OID, -1, pa.int64(), "bigint"),
        (FLOAT4, -1, pa.float32(), "float"),
        (FLOAT8, -1, pa.float64(), "double"),
        (NUMERIC, numeric(12, 2), pa.decimal128(12, 2), "decimal(12,2)"),
        (NUMERIC, numeric(1, 0), pa.decimal128(1, 0), "decimal(1,0)"),
        (NUMERIC, numeric(38, 38), pa.decimal128(38, 38), "decimal(38,38)"),
        (NUMERIC, -1, pa.string(), "string"),
        (NUMERIC, numeric(39, 0), pa.string(), "string"),
        (NUMERIC, numeric(3, 5), pa.string(), "string"),
        (NUMERIC, numeric(10, -2), pa.string(), "string"),
        (BYTEA, -1, pa.binary(), "binary"),
        (DATE, -1, pa.date32(), "date"),
        (TIMESTAMP, -1, pa.timestamp("us"), "timestamp_ntz"),
        (TIMESTAMPTZ, 3, pa.timestamp("us", "UTC"), "timestamp"),
        *((oid, -1, pa.string(), "string") for oid in (TEXT, VARCHAR, BPCHAR, NAME, CHAR, UUID, JSON, JSONB)),
        *((oid, -1, pa.string(), "string") for oid in (INTERVAL, DOMAIN)),
        (INT4_ARRAY, -1, pa.list_(pa.int32()), "array<int>"),
        (NUMERIC_ARRAY, numeric(8, 2), pa.list_(pa.decimal128(8, 2)), "array<decimal(8,2)>"),
        (NUMERIC_ARRAY, -1, pa.list_(pa.string()), "array<string>"),
        (1187, -1, pa.list_(pa.string()), "array<string>"),
    ],
)
def test_type_table(oid, modifier, arrow, spark):
    kind = column_type(oid, modifier)
    assert (kind.arrow_type, kind.spark_type) == (arrow, spark)
    assert pickle.loads(pickle.dumps(kind)) == kind


@pytest.mark.parametrize(
    ("oid", "override", "spark"),
    [
        (INT4, "string", "string"),
        (INT4, "INT", "int"),
        (INT4, "long", "bigint"),
        (INT2, "integer", "int"),
        (FLOAT4, "double", "double"),
        (NUMERIC, "decimal(20, 4)", "decimal(20,4)"),
        (NUMERIC, "decimal(20)", "decimal(20,0)"),
        (TIMESTAMPTZ, "string", "string"),
        (DOMAIN, "string", "string"),
        (INT4_ARRAY, "string", "string"),
        (INT4_ARRAY, "array<long>", "array<bigint>"),
        (INT4_ARRAY, "ARRAY<string>", "array<string>"),
        (NUMERIC_ARRAY, "array<decimal(9, 2)>", "array<decimal(9,2)>"),
    ],
)
def test_override(oid, override, spark):
    assert column_type(oid, -1, override).spark_type == spark


@pytest.mark.parametrize(
    ("oid", "override"),
    [
        (INT8, "int"),
        (INT4, "double"),
        (TEXT, "int"),
        (TIMESTAMP, "timestamp"),
        (INT4, "decimal(10,0)"),
        (NUMERIC, "decimal(39,0)"),
        (NUMERIC, "decimal(3,4)"),
        (NUMERIC, "decimal(0,0)"),
        (NUMERIC, "double"),
        (DOMAIN, "int"),
        (BOOL, "nonsense"),
        (INT4_ARRAY, "int"),
        (INT4_ARRAY, "array<smallint>"),
        (INT4_ARRAY, "array<array<int>>"),
        (INT4, "array<int>"),
    ],
)
def test_override_that_is_not_exact_is_refused(oid, override):
    with pytest.raises(UnsupportedTypeError, match="string"):
        column_type(oid, -1, override)


@pytest.mark.parametrize(
    ("oid", "value", "expected"),
    [
        (BOOL, "t", True),
        (BOOL, "f", False),
        (INT2, "-32768", -32768),
        (INT4, "2147483647", 2147483647),
        (INT8, "-9223372036854775808", -(2**63)),
        (OID, "4294967295", 4294967295),
        (FLOAT4, "1e-45", 1.401298464324817e-45),
        (FLOAT4, "3.4028235e+38", 3.4028234663852886e38),
        (FLOAT8, "5e-324", 5e-324),
        (FLOAT8, "-Infinity", -math.inf),
        (BPCHAR, "ab  ", "ab  "),
        (TEXT, "", ""),
        (TEXT, "é\n\\x00", "é\n\\x00"),
        (BYTEA, "\\x", b""),
        (BYTEA, "\\x00fF5c78", b"\x00\xff\\x"),
        (DATE, "1970-01-01", 0),
        (DATE, "0001-01-01", -719_162),
        (DATE, "9999-12-31", 2_932_896),
        (DATE, "10000-01-01", 2_932_897),
        (DATE, "0001-12-31 BC", -719_163),
        (DATE, "4714-11-24 BC", -2_440_588),
        (DATE, "5874897-12-31", 2_145_042_905),
        (DATE, "infinity", DATE_INFINITY),
        (DATE, "-infinity", DATE_MINUS_INFINITY),
        (TIMESTAMP, "1970-01-01 00:00:00.000001", 1),
        (TIMESTAMP, "1969-12-31 23:59:59.9", -100_000),
        (TIMESTAMP, "0044-03-15 12:00:00 BC", days_since_epoch(-43, 3, 15) * DAY + DAY // 2),
        (TIMESTAMP, "294247-01-10 04:00:54.775806", TIMESTAMP_INFINITY - 1),
        (TIMESTAMP, "infinity", TIMESTAMP_INFINITY),
        (TIMESTAMPTZ, "1970-01-01 00:00:01+00", 1_000_000),
        (TIMESTAMPTZ, "0001-12-31 23:59:59.999999+00 BC", days_since_epoch(1, 1, 1) * DAY - 1),
        (TIMESTAMPTZ, "4714-11-24 00:00:00+00 BC", -2_440_588 * DAY),
        (TIMESTAMPTZ, "10000-01-01 00:00:00.5+00", 2_932_897 * DAY + 500_000),
        (TIMESTAMPTZ, "-infinity", TIMESTAMP_MINUS_INFINITY),
    ],
)
def test_text(oid, value, expected):
    assert text(oid, value) == [expected]
    assert text(oid, None, value, None, value) == [None, expected, None, expected]
    assert text(oid, None, None) == [None, None]
    assert text(oid) == []
    assert text(oid, value, override="string") == [value]


def test_text_in_other_arrays():
    values = pa.array(["x", "17", None, "-4", "x"]).slice(1, 3)
    for array in (
        values,
        values.cast(pa.binary()),
        values.cast(pa.large_string()),
        values.cast(pa.large_binary()),
    ):
        assert convert_text(array, column_type(INT4, -1), "c").to_pylist() == [17, None, -4]
        assert convert_text(array, column_type(TEXT, -1), "c").to_pylist() == ["17", None, "-4"]
    flags = pa.array(["x", "t", None, "f", None]).slice(1)
    assert convert_text(flags, column_type(BOOL, -1), "c").to_pylist() == [True, None, False, None]


def test_nan_is_a_double_but_not_a_decimal():
    assert math.isnan(text(FLOAT8, "NaN")[0])
    with pytest.raises(ValueNotRepresentableError):
        text(NUMERIC, "NaN", modifier=numeric(12, 2))


def test_real_as_double_keeps_its_number():
    assert text(FLOAT4, "1.1", override="double") == [1.100000023841858]


def test_decimal_override_never_rounds():
    assert text(NUMERIC, "1.50", "-2", override="decimal(10,2)") == [Decimal("1.50"), Decimal("-2.00")]
    with pytest.raises(ValueNotRepresentableError):
        text(NUMERIC, "1.234", override="decimal(10,2)")


SECRET = "4111222233334444"


@pytest.mark.parametrize(
    ("oid", "modifier", "value"),
    [
        (INT4, -1, SECRET),
        (INT8, -1, SECRET + "x"),
        (BOOL, -1, SECRET),
        (BOOL, -1, "4"),
        (FLOAT8, -1, SECRET + "x"),
        (NUMERIC, numeric(10, 2), SECRET),
        (BYTEA, -1, "\\x" + SECRET + "0"),
        (BYTEA, -1, "\\x" + SECRET + "zz"),
        (BYTEA, -1, SECRET + "\\9"),
        (DATE, -1, SECRET),
        (DATE, -1, "2024-02-30"),
        (DATE, -1, SECRET + " BC"),
        (DATE, -1, "0044-03-15 00:00:00 BC"),
        (TIMESTAMP, -1, "294247-01-10 04:00:54.775807"),
        (TIMESTAMP, -1, "294276-12-31 23:59:59.999999"),
        (TIMESTAMP, -1, "0044-03-15 00:00:00+00 BC"),
        (TIMESTAMPTZ, -1, "0044-03-15 00:00:00+05 BC"),
        (TIMESTAMPTZ, -1, "0044-03-15 00:00:00 BC"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_names_only_the_column(oid, modifier, value):
    with pytest.raises(ValueNotRepresentableError) as caught:
        convert_text(pa.array([None, value.encode()]), column_type(oid, modifier), "card")
    assert '"card"' in str(caught.value)
    assert value not in str(caught.value)
    assert "4111" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_bytes_that_are_not_utf8_are_no_string():
    for convert in (convert_text, convert_copy):
        with pytest.raises(ValueNotRepresentableError):
            convert(pa.array([b"\xff\xfe"]), column_type(TEXT, -1), "c")


def test_infinities_are_beyond_all_values_of_postgresql():
    assert days_since_epoch(5_874_898, 6, 4) < DATE_INFINITY < 2**31
    assert -(2**31) < DATE_MINUS_INFINITY < days_since_epoch(-4713, 11, 24)
    assert -(2**63) < TIMESTAMP_MINUS_INFINITY < days_since_epoch(-4713, 11, 24) * DAY


@given(st.dates())
def test_days_since_epoch(day):
    assert days_since_epoch(day.year, day.month, day.day) == day.toordinal() - dt.date(1970, 1, 1).toordinal()


@given(st.lists(st.none() | st.binary(max_size=20)), st.data())
@example([b"\\", None, b"\\x41", b""], None)
def test_bytea_in_both_formats(values, data):
    def escaped(value: bytes) -> str:
        """The output of byteaout with bytea_output = escape."""
        return "".join("\\\\" if b == 0x5C else chr(b) if 0x20 <= b <= 0x7E else f"\\{b:03o}" for b in value)

    def printed(value: bytes) -> str:
        in_hex = data is None or data.draw(st.booleans())
        return "\\x" + value.hex() if in_hex else escaped(value)

    assert text(BYTEA, *(None if v is None else printed(v) for v in values)) == values
    assert text(BYTEA, *(None if v is None else escaped(v) for v in values)) == values


@given(st.lists(st.floats()))
def test_double(values):
    assert list(map(repr, text(FLOAT8, *map(repr, values)))) == list(map(repr, values))


@given(
    st.lists(
        st.decimals(allow_nan=False, allow_infinity=False, places=10, min_value=-(10**20), max_value=10**20)
    )
)
def test_decimal(values):
    assert text(NUMERIC, *(f"{v:f}" for v in values), modifier=numeric(38, 10)) == values


def printed_timestamp(micros: int, zone: str) -> str:
    """The output of EncodeDateTime. It is computed in another way than by the code: with Python's calendar, moved by 400 years."""
    days, rest = divmod(micros, DAY)
    cycles, day = divmod(days + 719_162, 146_097)
    date = dt.date.fromordinal(day + 1)
    year = date.year + 400 * cycles
    era, shown = (" BC", 1 - year) if year <= 0 else ("", year)
    seconds, fraction = divmod(rest, 1_000_000)
    second = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    digits = f".{fraction:06}".rstrip("0") if fraction else ""
    return f"{shown:04}-{date.month:02}-{date.day:02} {second}{digits}{zone}{era}"


POSTGRES_TIMESTAMPS = st.integers(-2_440_588 * DAY, TIMESTAMP_INFINITY - 1) | st.integers(
    -(10**15), 3 * 10**15
)


@pytest.mark.parametrize(("oid", "zone"), [(TIMESTAMP, ""), (TIMESTAMPTZ, "+00")])
@given(values=st.lists(st.sampled_from([-math.inf, math.inf, None]) | POSTGRES_TIMESTAMPS, max_size=12))
def test_timestamps_in_text_and_send_format(oid, zone, values):
    names = {-math.inf: "-infinity", math.inf: "infinity", None: None}
    limits = {-math.inf: -(2**63), math.inf: 2**63 - 1}
    replaced = {-math.inf: TIMESTAMP_MINUS_INFINITY, math.inf: TIMESTAMP_INFINITY}
    expected = [replaced.get(v, v) for v in values]
    assert text(oid, *(names[v] if v in names else printed_timestamp(v, zone) for v in values)) == expected
    counted = [v if v is None else limits[v] if v in limits else v - POSTGRES_EPOCH * DAY for v in values]
    sent = [None if v is None else struct.pack(">q", v) for v in counted]
    kind = column_type(oid, -1)
    array = convert_copy(pa.array(sent, pa.binary()), kind, "c")
    assert array.type == kind.arrow_type
    assert numbers(array) == expected


@given(values=st.lists(st.sampled_from([-math.inf, math.inf, None]) | st.integers(-2_440_588, 2_145_042_905)))
def test_dates_in_text_and_send_format(values):
    names = {-math.inf: "-infinity", math.inf: "infinity", None: None}
    limits = {-math.inf: -(2**31), math.inf: 2**31 - 1}
    expected = [{-math.inf: DATE_MINUS_INFINITY, math.inf: DATE_INFINITY}.get(v, v) for v in values]
    printed = [
        names[v] if v in names else printed_timestamp(v * DAY, "").replace(" 00:00:00", "") for v in values
    ]
    assert text(DATE, *printed) == expected
    sent = [
        v if v is None else struct.pack(">i", limits[v] if v in limits else v - POSTGRES_EPOCH)
        for v in values
    ]
    assert (
        numbers(convert_copy(pa.array(["x", *sent], pa.binary()).slice(1), column_type(DATE, -1), "c"))
        == expected
    )


def test_send_format_that_does_not_fit_is_refused():
    for number in (TIMESTAMP_INFINITY - POSTGRES_EPOCH * DAY, 2**63 - 2):
        with pytest.raises(ValueNotRepresentableError):
            convert_copy(pa.array([struct.pack(">q", number)]), column_type(TIMESTAMP, -1), "c")
    with pytest.raises(ProtocolError):
        convert_copy(pa.array([b"1234"]), column_type(TIMESTAMP, -1), "c")


def test_an_item_of_a_tsquery_that_is_neither_a_value_nor_an_operator_is_refused():
    def not_a(kind: int) -> pa.Array:
        return pa.array([struct.pack(">iBB", 2, kind, 1) + b"\x01\x00\x00a\x00"])

    assert convert_binary(not_a(2), column_type(3615, -1), "c").to_pylist() == ["!'a'"]
    with pytest.raises(ProtocolError):
        convert_binary(not_a(3), column_type(3615, -1), "c")


def numeric_sent(value: Decimal) -> bytes:
    """The result of numeric_send for a number: its digits in groups of four around the decimal point."""
    sign, digits, exponent = value.as_tuple()
    scale = max(0, -exponent)
    whole, _, fraction = f"{value.copy_abs():f}".partition(".")
    whole = whole.zfill(-(-len(whole) // 4) * 4)
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    groups = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while groups and not groups[0]:
        groups, weight = groups[1:], weight - 1
    while groups and not groups[-1]:
        groups = groups[:-1]
    negative = 0x4000 if sign and any(digits) else 0
    return struct.pack(f">hhHh{len(groups)}H", len(groups), weight if groups else 0, negative, scale, *groups)


@pytest.mark.parametrize(
    ("precision", "scale"), [(1, 0), (4, 4), (17, 6), (18, 0), (18, 18), (19, 3), (38, 10)]
)
@settings(max_examples=50)
@given(data=st.data())
def test_decimal_in_send_format(precision, scale, data):
    """A number that fits is decoded, any other is refused, in binary format as in text."""
    kind = column_type(NUMERIC, numeric(precision, scale))
    digits = st.integers(-(10 ** (precision + 1)), 10 ** (precision + 1))
    values = data.draw(
        st.lists(
            st.builds(lambda n, s: Decimal(n).scaleb(-s, EXACT), digits, st.integers(scale, scale + 1)),
            max_size=4,
        )
    )
    for printed, sent in zip((f"{v:f}" for v in values), map(numeric_sent, values), strict=True):
        assert convert_binary(pa.array([sent]), column_type(NUMERIC, -1), "c").to_pylist() == [
            printed.removeprefix("-") if Decimal(printed).is_zero() else printed
        ]
        try:
            expected = convert_text(pa.array([printed.encode()]), kind, "c")
        except ValueNotRepresentableError:
            with pytest.raises(ValueNotRepresentableError):
                convert_binary(pa.array([sent]), kind, "c")
        else:
            assert convert_binary(pa.array([sent]), kind, "c").equals(expected)


@pytest.mark.parametrize("scale", [0, 2])
@pytest.mark.parametrize(
    "value",
    [2**128, -(2**128), 10**38, 10**39, 12345678901234567890123456789012345678901, 10**45, 7 * 10**200],
)
def test_a_number_with_too_many_digits_is_not_reduced_modulo_a_power_of_two(value, scale):
    kind = column_type(NUMERIC, override=f"decimal(38,{scale})", type_modifier=-1)
    for number in (Decimal(value), Decimal(value).scaleb(-scale, EXACT)):
        with pytest.raises(ValueNotRepresentableError):
            convert_text(pa.array([f"{number:f}".encode()]), kind, "c")
        with pytest.raises(ValueNotRepresentableError):
            convert_binary(pa.array([numeric_sent(number)]), kind, "c")
    largest = Decimal(10**38 - 1).scaleb(-scale, EXACT)
    assert convert_text(pa.array([f"000{largest:f}".encode()]), kind, "c").to_pylist() == [largest]


@pytest.mark.parametrize(
    ("defined", "oid", "sent", "expected"),
    [
        ({DOMAIN: DerivedType("e")}, DOMAIN, b"sad", "sad"),
        ({DOMAIN: DerivedType("d", INT4)}, DOMAIN, b"\0\0\0\7", "7"),
        (
            {DOMAIN: DerivedType("d", INT4_ARRAY)},
            DOMAIN,
            struct.pack(">iiIiiii", 1, 0, INT4, 1, 0, -1, 0)[:-4],
            "[0:0]={NULL}",
        ),
        ({DOMAIN: DerivedType("c")}, DOMAIN, struct.pack(">iIiii", 1, INT4, 4, 7, 0)[:-4], "(7)"),
        ({DOMAIN: DerivedType("r", FLOAT8)}, DOMAIN, b"\x18", "(,)"),
        (
            {DOMAIN: DerivedType("m", 17_000), 17_000: DerivedType("r", INT4)},
            DOMAIN,
            b"\0\0\0\1\0\0\0\1\x01",
            "{empty}",
        ),
    ],
)
def test_user_defined_types_are_printed_by_their_parts(defined, oid, sent, expected):
    kind = column_type(oid, -1, None, defined)
    assert pickle.loads(pickle.dumps(kind)) == kind
    assert convert_binary(pa.array([sent, None]), kind, "c").to_pylist() == [expected, None]
    with pytest.raises(UnsupportedBinaryError, match=r'"c".*\n.*without `binary`'):
        convert_binary(pa.array([sent]), column_type(oid, -1), "c")


@settings(max_examples=400)
@given(
    oid=st.sampled_from([*BUILTIN_TYPES, *ELEMENT_OIDS]),
    values=st.lists(st.none() | st.binary(max_size=40), max_size=3),
    override=st.sampled_from([None, "string"]),
)
def test_binary_bytes_that_are_no_value_of_their_type_are_pgsieves_own_error(oid, values, override):
    kind = column_type(oid, -1, override)
    try:
        column = convert_binary(pa.array(values, pa.binary()), kind, "c")
    except PgsieveError as error:
        assert error.sqlstate in {"08P01", "22P03", "0A000", None}  # noqa: PT017 - either outcome will do
    else:
        assert column.type == kind.arrow_type
        column.validate(full=True)
        assert column.is_valid().to_pylist() == [v is not None for v in values]


@pytest.mark.parametrize(
    ("oid", "modifier", "override", "expected"),
    [
        (INT4, -1, None, '"a{}"'),
        (BPCHAR, 9, None, '"a{}"'),
        (DATE, -1, None, 'pg_catalog.date_send("a{}")'),
        (TIMESTAMPTZ, -1, None, 'pg_catalog.timestamptz_send("a{}")'),
        (NUMERIC, numeric(3, 1), None, '"a{}"::pg_catalog.text'),
        (NUMERIC, numeric(3, 1), "string", '"a{}"::pg_catalog.text'),
        (DOMAIN, -1, None, 'CASE WHEN pg_catalog.num_nulls("a{}") = 0 THEN pg_catalog.concat("a{}") END'),
        (BOOL, -1, "string", 'CASE WHEN pg_catalog.num_nulls("a{}") = 0 THEN pg_catalog.concat("a{}") END'),
    ],
)
def test_copy_expression(oid, modifier, override, expected):
    assert copy_expression('"a{}"', oid, modifier, override) == expected


@given(st.integers(0, 50), st.integers(0, 50))
def test_the_first_value_that_cannot_be_converted_is_named(before, after):
    numeric = column_type(1700, (4 << 16 | 2) + 4)
    values = pa.array([b"1.50"] * before + [b"NaN"] + [None, b"NaN", b"-2"] * after, pa.binary())
    with pytest.raises(ValueNotRepresentableError) as refused:
        convert_text(values, numeric, "price")
    assert refused.value.value_index == before
    shown = str(refused.value.with_key({"a": "1", "b": "x"}))
    assert 'column "price"' in shown
    assert "in the row with key (a, b)=(1, x)" in shown
    assert "NaN" not in shown
