"""Every function that a row filter may call, evaluated in this process. PostgreSQL is the oracle of values and errors.

The operands are the smallest, the largest and other edge values of their types, or random ones. PGSIEVE_SEED repeats a run,
PGSIEVE_BUDGET_SECONDS is the time to spend.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.row_filters import nodes, numeric, procedures
from pgsieve.decoding.row_filters.constants import RefusedError, constant_from_text
from pgsieve.decoding.row_filters.evaluation.compiler import compile_tree
from pgsieve.decoding.row_filters.evaluation.values import DAY_MICROS, to_python_values
from pgsieve.decoding.row_filters.functions import make_builtin_call
from pgsieve.decoding.row_filters.nodes import ColumnValue, Node
from pgsieve.decoding.row_filters.simplification import choose_implementations
from pgsieve.decoding.values.datetimes import POSTGRES_EPOCH_DAYS
from pgsieve.decoding.values.output_datetimes import format_timestamp
from pgsieve.decoding.values.types import column_type, convert_text
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.random_filters import DECIMALS, FLOATS, POOLS, SMALL, UNBOUNDED, WIDE, quoted
from tests.fixtures.tries import budget_seconds, drawn_seed

SEED = drawn_seed()
BUDGET_SECONDS = budget_seconds(2)
CALLS = 4

TEXTS = [*POOLS["c"], "aaXbbXaa", "ΟΔΟΣ", "a" * 20, "  a  "]
VALUES: dict[int, tuple[str, list[str]]] = {
    nodes.INT2: ("smallint", [*SMALL, "32767", "-32768", "181", "-182"]),
    nodes.INT4: ("integer", [*SMALL, "2147483647", "-2147483648", "46341", "1000000", "-5000", "12", "29"]),
    nodes.INT8: ("bigint", [*SMALL, "9223372036854775807", "-9223372036854775808", "4294967296", "3037000500"]),
    nodes.NUMERIC: ("numeric", [*DECIMALS, *WIDE, *UNBOUNDED, "9" * 60, "1e-60", "1e130000", "0.5", "-0.5", "1.000"]),
    nodes.FLOAT4: ("real", [*FLOATS, "3.4028235e38", "1e-45", "-1.1754944e-38", "16777216"]),
    nodes.FLOAT8: ("double precision", [*FLOATS, "1.7976931348623157e308", "5e-324", "4503599627370497.5", "-0.5", "2147483647.5"]),
    nodes.TEXT: ("text", TEXTS),
    nodes.BPCHAR: ("bpchar", TEXTS),
    nodes.BYTEA: ("bytea", [*POOLS["y"], "\\x0102030405"]),
    nodes.DATE: ("date", [*POOLS["d"], "4714-11-25 BC", "294246-12-31", "294277-01-01", "2021-01-03", "2020-12-31", "0001-01-01 BC"]),
    nodes.TIME: ("time", POOLS["ti"]),
    nodes.TIMESTAMP: ("timestamp", [*POOLS["ts"], "4714-11-24 00:00:00 BC", "294246-12-31 23:59:59.999999", "2021-01-03 00:00:00"]),
    nodes.TIMESTAMPTZ: ("timestamptz", [*POOLS["tz"], "4714-11-24 00:00:00+00 BC", "294246-12-31 23:59:59+00"]),
    nodes.INTERVAL: ("interval", ["1 day", "-1 mon", "12 mons", "1 year -1 mons +31 days 24:00:00", "00:00:00.000001",
                                  "-100 years", "178000000 years", "-31 days", "1 mon -31 days"]),
}  # fmt: skip
FIELDS = ["year", "month", "day", "quarter", "week", "dow", "isodow", "doy", "hour", "minute", "WEEK",
          "second", "milliseconds", "microseconds", "isoyear", "decade", "century", "millennium", "julian", "epoch"]  # fmt: skip


def any_numeric(rng: random.Random) -> str:
    """A numeric of any size and scale, or a special value such as NaN."""
    if rng.random() < 0.1:
        return rng.choice(["NaN", "Infinity", "-Infinity", "0", "0.000", "1", "-1", "10000", "0.0001"])
    digits = "".join(rng.choice("0123456789") for _ in range(rng.choice([1, 2, 4, 5, 8, 17, 40, 60])))
    point = rng.randint(0, len(digits))
    zeros = "0" * rng.choice([0, 0, 0, 3, 9, 25])
    text = f"{digits[:point]}{zeros if rng.random() < 0.5 else ''}.{zeros}{digits[point:]}"
    return rng.choice(["", "-"]) + (f"0{text}" if text.startswith(".") else text).rstrip(".")


def any_integer(rng: random.Random) -> float:
    limit = rng.choice([3, 100, 1 << 31, 1 << 31])
    return rng.choice([rng.randrange(-limit, limit), -limit if limit > 100 else 0])


def any_double(rng: random.Random) -> float:
    return rng.choice(
        [0.0, 0.1, 1e300, -1e-300, float("nan"), rng.random(), rng.uniform(-1e6, 1e6), 123456.5]
    )


def any_real(rng: random.Random) -> float:
    return rng.choice([0.5, 123456.5, 1e10, 0.15625, float("nan"), float(rng.randrange(1 << 24)) / 8])


def pieces(rng: random.Random, characters: str = "ab%_\\😀ä. A1") -> str:
    return "".join(rng.choice(characters) for _ in range(rng.randint(0, 5)))


def interval(rng: random.Random) -> str:
    """An interval as the server prints it."""
    parts = [f"{rng.randint(-20, 20)} {unit}" for unit in ("years", "mons", "days") if rng.random() < 0.5]
    clock = (
        f"{rng.choice(['', '-'])}{rng.randint(0, 99):02}:{rng.randint(0, 59):02}:{rng.uniform(0, 59):09.6f}"
    )
    return " ".join([*parts, clock])


#: Functions that draw random values, by type.
DRAWN: dict[int, Callable[[random.Random], str | float]] = {
    nodes.INT4: any_integer,
    nodes.INT8: any_integer,
    nodes.NUMERIC: any_numeric,
    nodes.FLOAT4: any_real,
    nodes.FLOAT8: any_double,
    nodes.TEXT: pieces,
    nodes.INTERVAL: interval,
}


def drawn(oid: int, rng: random.Random) -> str:
    """A value of a type as text: an edge case or a random one."""
    return str(DRAWN[oid](rng)) if oid in DRAWN and rng.random() < 0.4 else rng.choice(VALUES[oid][1])


Procedures = list[tuple[str, procedures.Procedure]]


def callable_procedures() -> Procedures:
    """All procedures except those that depend on a case mapping, and those that only the server evaluates."""
    return [
        (name, procedure)
        for name, several in procedures.PROCEDURES.items()
        for procedure in several
        if procedure.name not in ("-", "lower", "upper", "initcap")
    ]


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS evaluated_functions WITH (FORCE)")
        admin.execute("CREATE DATABASE evaluated_functions TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'")
    with psycopg.connect(
        publisher_server.conninfo(dbname="evaluated_functions"), autocommit=True
    ) as connection:
        connection.execute("SET timezone = 'UTC'; SET extra_float_digits = 3")
        connection.execute(
            """CREATE FUNCTION outcome(expression text, OUT result text) LANGUAGE plpgsql AS $$
            BEGIN
              EXECUTE format('SELECT (%s)::text', expression) INTO result;
            EXCEPTION WHEN OTHERS THEN
              result := 'error ' || SQLSTATE;
            END $$"""
        )
        yield connection


def constant(name: str, procedure: procedures.Procedure, place: int, rng: random.Random) -> str | None:
    """The operand at this place if it has to be a constant."""
    of_field = name in ("extract", "date_part", "date_trunc")
    if of_field and place == 0:
        return rng.choice(FIELDS)
    if name in ("repeat", "lpad", "rpad") and place == 1:
        return rng.choice([*SMALL, "-2147483648"])
    if procedure.argument_oids[place] == nodes.INTERVAL:
        return rng.choice(VALUES[nodes.INTERVAL][1])
    return None


def written(name: str, procedure: procedures.Procedure, operands: list[str]) -> str:
    typed = [
        f"{quoted(operand)}::{VALUES[oid][0]}"
        for oid, operand in zip(procedure.argument_oids, operands, strict=True)
    ]
    if name.isidentifier():
        return f'pg_catalog."{name}"({", ".join(typed)})'
    return f" {name} ".join(["", *typed] if len(typed) == 1 else typed)


def evaluated(
    name: str, procedure: procedures.Procedure, operands: list[str], constants: list[bool], major_version: int
) -> Any:
    """The result of the call in this process, or its error in the form of the server function `outcome`."""
    arguments: list[Node] = []
    row: list[Any] = []
    for oid, operand, is_constant in zip(procedure.argument_oids, operands, constants, strict=True):
        if is_constant:
            arguments.append(constant_from_text(operand, oid))
        else:
            column = convert_text(pa.array([operand]), column_type(oid, -1), "x")
            arguments.append(ColumnValue(f"x{len(row)}", "C", type_oid=oid))
            row += to_python_values(column, oid)
    program = compile_tree(choose_implementations(make_builtin_call(name, arguments), major_version))
    try:
        return program.evaluate([row[int(column[1:])] for column in program.columns])
    except PgsieveError as error:
        return f"error {error.sqlstate}"


def same(result: Any, expected: str | None, type_oid: int) -> bool:
    """Whether a value equals the text that the server prints."""
    if expected is None or expected.startswith("error ") or isinstance(result, str):
        return result == expected
    if result is None:
        return False
    if type_oid == nodes.NUMERIC:
        return isinstance(result, Decimal) and numeric.numeric_text(result) == expected
    if type_oid == nodes.BYTEA:
        return f"\\x{result.hex()}" == expected
    if type_oid == nodes.BOOL:
        return str(result).lower() == expected
    if type_oid == nodes.TIMESTAMP and isinstance(
        result, int
    ):  # as text: Arrow's timestamps end earlier than the server's
        return format_timestamp(result - POSTGRES_EPOCH_DAYS * DAY_MICROS) == expected
    (value,) = to_python_values(convert_text(pa.array([expected]), column_type(type_oid, -1), "x"), type_oid)
    return value == result or (value != value and result != result)  # noqa: PLR0124 - both are NaN


def test_every_function_gives_the_servers_result(server: psycopg.Connection) -> None:
    rng = random.Random(SEED)
    print(f"reproduce: PGSIEVE_SEED={SEED}", flush=True)
    major_version = server.info.server_version // 10000
    deadline, compared = time.monotonic() + BUDGET_SECONDS, 0
    while compared == 0 or time.monotonic() < deadline:
        calls = []
        for name, procedure in callable_procedures() * CALLS:
            chosen = [constant(name, procedure, place, rng) for place in range(len(procedure.argument_oids))]
            operands = [
                text or drawn(oid, rng) for text, oid in zip(chosen, procedure.argument_oids, strict=True)
            ]
            if procedure.name in ("numeric_round", "numeric_trunc") and abs(int([*operands, "0"][1])) > 2000:
                continue  # it depends on the server's version
            try:
                result = evaluated(
                    name, procedure, operands, [text is not None for text in chosen], major_version
                )
            except RefusedError:
                continue
            calls.append((written(name, procedure, operands), procedure.result_oid, result))
        expected = server.execute(
            "SELECT outcome(expression) FROM unnest(%s::text[]) WITH ORDINALITY AS e (expression, n) ORDER BY n",
            [[text for text, _, _ in calls]],
        ).fetchall()
        for (text, type_oid, result), (truth,) in zip(calls, expected, strict=True):
            assert same(result, truth, type_oid), f"seed {SEED}: {text}: server {truth!r}, here {result!r}"
        compared += len(calls)
    print(f"drawn: seed {SEED}, {compared} calls compared")


def test_intervals_are_compared_as_the_server_does(server: psycopg.Connection) -> None:
    rng = random.Random(SEED)
    infinities = ["infinity", "-infinity"] if server.info.server_version >= 170000 else []

    def any_interval() -> str:
        return rng.choice(infinities) if infinities and rng.random() < 0.1 else interval(rng)

    pairs = [(any_interval(), any_interval()) for _ in range(2000)]
    texts = [f"{quoted(left)}::interval < {quoted(right)}::interval" for left, right in pairs]
    left_values, right_values = (
        to_python_values(pa.array(side), nodes.INTERVAL) for side in zip(*pairs, strict=True)
    )
    rows = server.execute(
        "SELECT outcome(expression) FROM unnest(%s::text[]) WITH ORDINALITY AS e (expression, n) ORDER BY n",
        [texts],
    )
    assert [row[0] for row in rows] == [
        str(left < right).lower() for left, right in zip(left_values, right_values, strict=True)
    ]
