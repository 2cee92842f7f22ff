"""What executors' Python computes for row filters, with PostgreSQL as the oracle: values, and errors.

PGSIEVE_SEED repeats a run, PGSIEVE_BUDGET_SECONDS is the time to spend.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.row_filters.numeric import FROM_NUMERIC, TO_NUMERIC
from pgsieve.decoding.row_filters.strings import INTEGER_FUNCTIONS, STRING_FUNCTIONS
from pgsieve.resources.postgres.embedded import EmbeddedServer

SEED = int(os.environ.get("PGSIEVE_SEED") or random.SystemRandom().randrange(1 << 32))
BUDGET_SECONDS = float(os.environ.get("PGSIEVE_BUDGET_SECONDS", "10"))
BATCH = 500

Draw = Callable[[random.Random], Any]


def numeric(rng: random.Random) -> str:
    """A numeric of any size and scale, or one of those that are no number."""
    if rng.random() < 0.1:
        return rng.choice(["NaN", "Infinity", "-Infinity", "0", "0.000", "1", "-1", "10000", "0.0001"])
    digits = "".join(rng.choice("0123456789") for _ in range(rng.choice([1, 2, 4, 5, 8, 17, 40, 60])))
    point = rng.randint(0, len(digits))
    zeros = "0" * rng.choice([0, 0, 0, 3, 9, 25])
    text = f"{digits[:point]}{zeros if rng.random() < 0.5 else ''}.{zeros}{digits[point:]}"
    return rng.choice(["", "-"]) + (f"0{text}" if text.startswith(".") else text).rstrip(".")


def integer(rng: random.Random) -> int:
    limit = rng.choice([3, 100, 1 << 31, 1 << 31])
    return rng.choice([rng.randrange(-limit, limit), -limit if limit > 100 else 0])


def place(rng: random.Random) -> int:
    return rng.choice([0, 1, 2, -1, -3, 5, 30, -30, 1500, -1500])


def double(rng: random.Random) -> float:
    return rng.choice(
        [0.0, 0.1, 1e300, -1e-300, float("nan"), rng.random(), rng.uniform(-1e6, 1e6), 123456.5]
    )


def real(rng: random.Random) -> float:
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


_BINARY = {
    "numeric_add": "{}::numeric + {}::numeric", "numeric_sub": "{}::numeric - {}::numeric",
    "numeric_mul": "{}::numeric * {}::numeric", "numeric_div": "{}::numeric / {}::numeric",
    "numeric_mod": "{}::numeric % {}::numeric", "numeric_div_trunc": "div({}::numeric, {}::numeric)",
    "numeric_gcd": "gcd({}::numeric, {}::numeric)", "numeric_lcm": "lcm({}::numeric, {}::numeric)",
}  # fmt: skip
_UNARY = {
    "numeric_sqrt": "sqrt({}::numeric)", "numeric_abs": "abs({}::numeric)", "numeric_uminus": "- ({}::numeric)",
    "numeric_uplus": "+ ({}::numeric)", "numeric_sign": "sign({}::numeric)", "numeric_ceil": "ceil({}::numeric)",
    "numeric_floor": "floor({}::numeric)", "numeric_round": "round({}::numeric)", "numeric_trunc": "trunc({}::numeric)",
    "numeric_trim_scale": "trim_scale({}::numeric)", "numeric_scale": "scale({}::numeric)",
    "numeric_min_scale": "min_scale({}::numeric)", "numeric_int2": "{}::numeric::int2",
    "numeric_int4": "{}::numeric::int4", "numeric_int8": "{}::numeric::int8",
}  # fmt: skip
#: A function's prosrc, how it is written, and what its arguments are drawn from.
FUNCTIONS: list[tuple[str, str, tuple[Draw, ...]]] = [
    *((name, sql, (numeric, numeric)) for name, sql in _BINARY.items()),
    *((name, sql, (numeric,)) for name, sql in _UNARY.items()),
    ("numeric_round", "round({}::numeric, {}::int)", (numeric, place)),
    ("numeric_trunc", "trunc({}::numeric, {}::int)", (numeric, place)),
    ("float8_numeric", "{}::float8::numeric", (double,)),
    ("float4_numeric", "{}::float4::numeric", (real,)),
    ("int4gcd", "gcd({}::int, {}::int)", (integer, integer)),
    ("int4lcm", "lcm({}::int, {}::int)", (integer, integer)),
    ("int8gcd", "gcd({}::bigint, {}::bigint)", (integer, integer)),
    ("int8lcm", "lcm({}::bigint, {}::bigint)", (integer, integer)),
    ("chr", "chr({}::int)", (integer,)),
    ("textlike", "{}::text LIKE {}::text", (pieces, pieces)),
    ("interval_cmp_value", "", (interval,)),
]  # fmt: skip
PYTHON = {**TO_NUMERIC, **FROM_NUMERIC, **INTEGER_FUNCTIONS, **STRING_FUNCTIONS}


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS filter_functions WITH (FORCE)")
        admin.execute("CREATE DATABASE filter_functions TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'")
    with psycopg.connect(publisher_server.conninfo(dbname="filter_functions"), autocommit=True) as connection:
        connection.execute(
            """CREATE FUNCTION outcome(expression text, OUT result text) LANGUAGE plpgsql AS $$
            BEGIN
              EXECUTE format('SELECT (%s)::text', expression) INTO result;
            EXCEPTION WHEN OTHERS THEN
              result := 'error ' || SQLSTATE;
            END $$"""
        )
        yield connection


def literal(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def computed(name: str, operands: list[Any]) -> str | None:
    """What the server's text of the result would be; of an error, its SQLSTATE."""
    try:
        value = PYTHON[name](*operands)
    except PgsieveError as error:
        return f"error {error.sqlstate}"
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def outcomes(connection: psycopg.Connection, expressions: list[str]) -> list[str | None]:
    rows = connection.execute(
        "SELECT outcome(expression) FROM unnest(%s::text[]) WITH ORDINALITY AS e (expression, n) ORDER BY n",
        [expressions],
    )
    return [row[0] for row in rows]


def test_functions_give_what_the_server_gives(server: psycopg.Connection) -> None:
    rng = random.Random(SEED)
    deadline, compared = time.monotonic() + BUDGET_SECONDS, 0
    names = [function for function in FUNCTIONS if function[1]]
    while time.monotonic() < deadline:
        calls = []
        for name, sql, draws in rng.choices(names, k=BATCH):
            operands = [draw(rng) for draw in draws]
            calls.append((name, operands, sql.format(*map(literal, operands))))
        expected = outcomes(server, [text for _, _, text in calls])
        for (name, operands, text), result in zip(calls, expected, strict=True):
            assert computed(name, operands) == result, f"seed {SEED}: {text}"
        compared += len(calls)
    print(f"seed {SEED}: {compared} calls compared")
    assert compared


def test_intervals_are_compared_as_the_server_does(server: psycopg.Connection) -> None:
    rng = random.Random(SEED)
    pairs = [(interval(rng), interval(rng)) for _ in range(2000)]
    texts = [f"{literal(left)}::interval < {literal(right)}::interval" for left, right in pairs]
    compare = STRING_FUNCTIONS["interval_cmp_value"]
    assert outcomes(server, texts) == [
        str(int(compare(left)) < int(compare(right))).lower() for left, right in pairs
    ]


def test_every_function_is_compared() -> None:
    assert PYTHON.keys() - {name for name, _, _ in FUNCTIONS} == {"numeric"}
