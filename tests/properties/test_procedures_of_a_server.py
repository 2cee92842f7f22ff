"""Which function or operator a name with argument types means, with PostgreSQL as the oracle.

Every name of `procedures` is tried with every combination of the types that filters know. pgsieve may refuse a combination, but
must not choose another function than the server.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from pgsieve.decoding.row_filters import nodes, operators, procedures, type_rules
from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.resources.postgres.embedded import EmbeddedServer

TYPES = {
    "bool": nodes.BOOL, "bytea": nodes.BYTEA, "int2": nodes.INT2, "int4": nodes.INT4, "int8": nodes.INT8,
    "numeric": nodes.NUMERIC, "float4": nodes.FLOAT4, "float8": nodes.FLOAT8, "text": nodes.TEXT,
    "varchar": nodes.VARCHAR, "bpchar": nodes.BPCHAR, "date": nodes.DATE, "time": nodes.TIME,
    "timestamp": nodes.TIMESTAMP, "timestamptz": nodes.TIMESTAMPTZ, "interval": nodes.INTERVAL,
    "uuid": nodes.UUID, "unknown": nodes.UNKNOWN,
}  # fmt: skip

# Functions that have another name in pgsieve than on the server: functions in SQL, and C functions with two names.
SAME = {
    "interval_pl_timestamp(interval, timestamp without time zone)": "timestamp_pl_interval",
    "interval_pl_date(interval, date)": "date_pl_interval",
    "round(numeric)": "numeric_round", "trunc(numeric)": "numeric_trunc",
    "bit_length(bytea)": "byteabitlen", "bit_length(text)": "textbitlen",
    "integer_pl_date(integer, date)": "integer_pl_date", "timedate_pl(time without time zone, date)": "timedate_pl",
    "date_part(text, date)": "date_part_date", "lpad(text, integer)": "lpad",
    "rpad(text, integer)": "rpad", "datetime_timestamp": "datetime_pl",
    "bytea_substr_no_len": "bytea_substr", "text_substr_no_len": "text_substr",
}  # fmt: skip

# The outermost function of an expression is the first one in the tree of a view on it.
_MEANT = r"""CREATE FUNCTION meant(expression text, OUT result text) LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('CREATE VIEW meant AS SELECT %s AS result', expression);
  SELECT coalesce(nullif(prosrc, ''), format('%s(%s)', proname, oidvectortypes(proargtypes))) INTO result
    FROM pg_rewrite JOIN pg_proc p
    ON p.oid = (regexp_match(ev_action::text, ':(?:opfuncid|funcid) (\d+)'))[1]::oid
    WHERE ev_class = 'meant'::regclass;
  DROP VIEW meant;
EXCEPTION WHEN undefined_function OR ambiguous_function OR indeterminate_datatype OR datatype_mismatch THEN
  result := 'error ' || SQLSTATE;
END $$"""


_TYPE = """CREATE FUNCTION type_of(expression text, OUT result text) LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('SELECT typname FROM pg_type WHERE oid = pg_typeof(%s)', expression) INTO result;
EXCEPTION WHEN undefined_function OR ambiguous_function OR indeterminate_datatype OR datatype_mismatch THEN
  result := 'error ' || SQLSTATE;
END $$"""


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS procedures WITH (FORCE)")
        admin.execute("CREATE DATABASE procedures TEMPLATE template0")
    with psycopg.connect(publisher_server.conninfo(dbname="procedures"), autocommit=True) as connection:
        connection.execute(_MEANT)
        connection.execute(_TYPE)
        yield connection


def written(types: tuple[str, ...]) -> list[str]:
    return ["NULL" if type_name == "unknown" else f"NULL::{type_name}" for type_name in types]


def operand(type_name: str) -> nodes.Node:
    oid = TYPES[type_name]
    if type_name == "unknown":
        return nodes.Constant(None, type_oid=oid)
    return nodes.ColumnValue(type_name, type_oid=oid)


def call(name: str, types: tuple[str, ...]) -> str:
    arguments = written(types)
    if name.isidentifier():
        return f'pg_catalog."{name}"({", ".join(arguments)})'
    return f"{arguments[0]} {name} {arguments[1]}" if len(arguments) == 2 else f"{name} {arguments[0]}"


def arithmetic(name: str, types: tuple[str, ...]) -> bool:
    """Whether it is arithmetic on numbers, which has its own rules."""
    oids = {TYPES[type_name] for type_name in types}
    return (
        name in operators.ARITHMETIC.values()
        and len(types) == 2
        and bool(oids & set(type_rules.NUMBERS))
        and oids <= {*type_rules.NUMBERS, nodes.UNKNOWN}
    )


def accepted() -> dict[str, str]:
    """By call, the function that pgsieve chooses. Refused calls are left out."""
    lengths = defaultdict(set)
    for name, candidates in procedures.PROCEDURES.items():
        lengths[name].update(len(candidate.argument_oids) for candidate in candidates)
    meant = {}
    for name in procedures.PROCEDURES:
        for length in sorted(lengths[name]):
            for types in itertools.product(TYPES, repeat=length):
                if arithmetic(name, types):
                    continue
                try:
                    procedure = procedures.resolve_procedure(name, [TYPES[type_name] for type_name in types])
                except RefusedError:
                    continue
                meant[call(name, types)] = procedure.name
    return meant


def test_a_call_means_the_same_as_on_the_server(server: psycopg.Connection) -> None:
    here = accepted()
    rows = server.execute(
        "SELECT expression, meant(expression) FROM unnest(%s::text[]) AS e (expression)", [list(here)]
    ).fetchall()
    wrong = {
        expression: (here[expression], there)
        for expression, there in rows
        if here[expression] != SAME.get(there, there)
    }
    assert len(here) > len(procedures.PROCEDURES)
    assert not wrong, "\n".join(f"{text}: {pair}" for text, pair in wrong.items())


def test_arithmetic_and_common_types_are_the_servers(server: psycopg.Connection) -> None:
    names = {oid: name for name, oid in TYPES.items()}
    here: dict[str, str] = {}
    for types in itertools.product(TYPES, repeat=2):
        for operator in operators.ARITHMETIC.values():
            if arithmetic(operator, types):
                with suppress(RefusedError):
                    computed = type_rules.make_arithmetic(operator, *map(operand, types))
                    here[call(operator, types)] = names[computed.type_oid]
    for types in itertools.product(TYPES, repeat=3):
        with suppress(RefusedError):
            _, oid, _ = type_rules.convert_to_common_type([*map(operand, types)])
            here[f"COALESCE({', '.join(written(types))})"] = names[oid]
    rows = server.execute(
        "SELECT expression, type_of(expression) FROM unnest(%s::text[]) AS e (expression)", [list(here)]
    ).fetchall()
    wrong = {expression: (here[expression], there) for expression, there in rows if here[expression] != there}
    assert len(here) > 300
    assert not wrong, "\n".join(f"{text}: {pair}" for text, pair in wrong.items())
