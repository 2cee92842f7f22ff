"""Which expressions are allowed as a row filter.

PostgreSQL documentation, Expression Restrictions; src/test/regress/sql/publication.sql.

CREATE PUBLICATION is the oracle. pgsieve refuses a row filter of pgsieve.yaml exactly if the server does, in the same words
and with the same SQLSTATE. No test needs a JVM: all of this is checked before any row is read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
import pytest

from pgsieve.decoding.errors import UnsupportedFilterError
from pgsieve.decoding.publications.catalog import Table
from pgsieve.decoding.publications.filters import parse_table_filter
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.filter_analysis import (
    RejectedFilterError,
    begin_analysis,
    read_filter_columns,
)
from tests.fixtures.tries import budget_seconds, drawing, drawn_seed

OBJECTS = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE FUNCTION mine(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 + 1';
CREATE FUNCTION less(int, int) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT $1 < $2';
CREATE OPERATOR <<< (LEFTARG = int, RIGHTARG = int, FUNCTION = less);
CREATE COLLATION own (provider = libc, locale = 'C');
CREATE COLLATION public."C" (provider = libc, locale = 'POSIX');
CREATE TABLE t (
    a int PRIMARY KEY, b text, c varchar(10), d date, e mood, f positive, g pair, h int[], i jsonb, j xml, k bool,
    l timestamptz, m numeric(10, 2), n text COLLATE own, o point, p int4range, "Odd ""name" int, q char(3), r interval,
    s int GENERATED ALWAYS AS (a * 2) STORED, ":quals" bytea, u double precision, v text COLLATE public."C", w text COLLATE "C"
);
"""

#: The expressions of PostgreSQL's own tests, and every other kind of node.
EXPRESSIONS = """
a IS NULL
(a > 5) IS FALSE
(a > 5) IS NOT UNKNOWN
a IS DISTINCT FROM 5
NOT a IS NOT DISTINCT FROM 5
(a, a + 1) < (2, 3)
(a, b) = (2, 'x')
b::varchar < '2'
length(b) < 6
NULLIF(1, 2) = a
CASE a WHEN 5 THEN true ELSE false END
CASE WHEN a > 5 THEN true END
COALESCE(b, 'foo') = 'foo'
GREATEST(a, 10) > 10
LEAST(b, c) < 'x'
a IN (2, 4, 6)
a NOT IN (2, 4, 6)
ARRAY[a] <@ ARRAY[2, 4, 6]
ROW(a, 2) IS NULL
j IS DOCUMENT
xmlexists('//foo[text() = ''bar'']' PASSING BY VALUE j)
xmlserialize(CONTENT j AS text) = 'x'
'abc' LIKE 'a%' AND a BETWEEN 1 AND 3
a BETWEEN SYMMETRIC 3 AND 1
t.a > 1
public.t.a > 1
other.a > 1
a = ANY (ARRAY[1, 2])
a < ALL ('{1,2}')
a = ANY (h)
h[1] = 2
h[1:2] = ARRAY[1]
b ~ '^x' OR b !~* 'y' OR b ILIKE 'z'
b COLLATE "C" < 'x'
b < '2' COLLATE own
n = 'x'
n IS NULL
n COLLATE "C" = 'x'
b COLLATE nowhere < 'x'
a COLLATE "C" < 3
true
NULL
k
k = true
1234
'true'
'maybe'
b
a + 1
a AND true
NOT a
a > 'x'
a <<< 5
a OPERATOR(public.<<<) 5
a OPERATOR(pg_catalog.<) 5
a @@@ 5
mine(a) < 10
nowhere(a) < 10
random() < 0.5
l < now()
l < current_timestamp
d < current_date
b = current_user
a::text = '1'
b::date < '2020-01-01'
b::int > 1
b = 'x'::name
d::timestamp < '2020-01-01'
d::timestamptz < '2020-01-01'
l::date < '2020-01-01'
l < '2020-01-01'
l < 'now'
d > 'today'
extract(year FROM d) = 2020
date_trunc('day', l) = l
date_trunc('day', l, 'UTC') = l
to_char(a, '999') = 'x'
e = 'sad'
e IS NULL
e IN ('sad')
'sad'::mood = 'sad'
f > 1
f IS NULL
a::positive > 1
g IS NULL
(g).a > 1
g = ROW(1, 'x')::pair
t IS NULL
t.* IS NULL
t = ROW(1)
ctid = '(0,1)'
tableoid = 1
t.xmin = '1'
nothing > 1
i -> 'x' IS NULL
i ->> 'x' = 'y'
i @> '{"a": 1}'
i['x'] IS NOT NULL
i IS JSON
json_array(1) IS NULL
a IN (SELECT 1)
EXISTS (SELECT 1)
(SELECT true)
a = (SELECT 1)
ARRAY(SELECT 1) = h
a < avg(a)
count(*) > 1
row_number() OVER () > 1
generate_series(1, 2) > 1
unnest(h) > 1
$1 > a
m * 2 > 3.5
m::int = 3
m = 'NaN'
u = 'Infinity'
-a > 1
@ a > 1
p @> a
int4range(a, 10) @> 5
o <-> point(1, 2) < 3
box(o, o) && box '((1,1),(2,2))'
"Odd ""name" = 1
q = 'x'
q || 'y' = 'xy'
b || a = 'x1'
b || e = 'xsad'
r > '1 day'
l + r > l
l - l > r
d + 1 > d
l AT TIME ZONE 'UTC' > '2020-01-01'
s > 2
":quals" = '\\x00'
":quals" IS NULL
md5(b) = 'x'
upper(b) = 'X'
substring(b FROM 2 FOR 3) = 'x'
position('x' IN b) > 0
trim(b) = 'x'
overlay(b PLACING 'x' FROM 1) = 'x'
b SIMILAR TO 'x%'
b LIKE 'a!%' ESCAPE '!'
b IS NORMALIZED
format('%s', b) = 'x'
concat(b, c) = 'x'
array_length(h, 1) = 1
h || 1 = h
h && ARRAY[1]
cardinality(h) = 0
pg_typeof(a) = 'int'::regtype
a::regclass = 't'::regclass
a = 't'::regclass::oid
pg_backend_pid() = a
nextval('x') = 1
set_config('a', 'b', true) = 'b'
xmlelement(name x, b) IS NOT NULL
xmlelement(name x, a) IS NOT NULL
xmlconcat(j, j) IS DOCUMENT
xmlforest(b AS x) IS DOCUMENT
xmlparse(CONTENT b) IS DOCUMENT
xmlpi(name x) IS DOCUMENT
row_to_json(t) IS NULL
ROW(a, b) IS NOT NULL
ROW(a, e) IS NULL
(a, e) IS NULL
(e, a) < ('sad', 1)
CASE WHEN e IS NULL THEN true ELSE a > 1 END
CASE e WHEN 'sad' THEN true END
COALESCE(e, 'sad') IS NULL
ARRAY[e] IS NULL
NULLIF(e, 'sad') IS NULL
make_interval(days => a) > r
nullif(b, '') IS NULL
bool(a)
a::bool
k::int = 1
k IS TRUE
a IS TRUE
a IS UNKNOWN
(VALUES (1)) = a
GROUPING(a) = 1
DEFAULT
*
t.*
:a = 1
a, b
a > 1 -- comment
a > 1 /* comment */
a > 1 /*
a >
a > 1)
(a > 1
a > 1; DROP TABLE t
a > 1) --
'unfinished
"unfinished
$$unfinished
E'\\q' = b
a = 1 a = 2
WHERE a > 1
SELECT 1
"""


#: Texts that are not expressions, although the surrounding statement would be valid with them.
ESCAPES = (
    "a > 1) OR (true",
    "a > 1) AND a IN (SELECT 1",
    "a > 1) WITH CHECK (true",
    "a > 1) WITH (publish = 'insert'",
    "a > 1) GROUP BY (a",
    "a > 1) UNION SELECT 1 WHERE (true",
    "a > 1); DROP TABLE t; SELECT (1",
    "a > 1); DROP TABLE t; --",
    "a > 1)) --",
    "a > 1) /*",
    "$$) $$ = b) OR ($$",
)

Verdict = tuple[str | None, str] | None


@dataclass(frozen=True)
class Database:
    """A publisher whose table t has a column of every kind of type."""

    connection: psycopg.Connection
    table: Table

    def examined(self, where: str) -> Verdict:
        """pgsieve's error for a row filter of t, or None if it accepts the filter."""
        try:
            read_filter_columns(self.connection, self.table, where)
        except RejectedFilterError as error:
            return error.sqlstate, error.message
        return None

    def server_says(self, where: str) -> Verdict:
        """The error of CREATE PUBLICATION, or None."""
        try:
            with self.connection.transaction(force_rollback=True):
                self.connection.execute(f"CREATE PUBLICATION p FOR TABLE t WHERE ({where}\n)", binary=True)
        except psycopg.Error as error:
            message, detail = str(error.diag.message_primary), error.diag.message_detail
            # In the form of pgsieve's own errors.
            return error.sqlstate, escape_controls(f"{message}: {detail}" if detail else message)
        return None


@pytest.fixture(scope="module", params=["publisher_server", "decoding_server", "publisher_19"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    server: EmbeddedServer = request.getfixturevalue(request.param)
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE filters")
        with psycopg.connect(server.conninfo(dbname="filters"), autocommit=True) as connection:
            connection.execute(OBJECTS)
            table = read_catalog(connection).table_by_name["public", "t"]
            with begin_analysis(connection):
                yield Database(connection, table)
            assert not connection.execute(
                "SELECT relname FROM pg_class WHERE relkind = 'v' AND oid > 16384"
            ).fetchall()
        admin.execute("DROP DATABASE filters")


def test_an_expression_is_refused_where_create_publication_refuses_it(database: Database) -> None:
    verdicts = {w: (database.examined(w), database.server_says(w)) for w in EXPRESSIONS.strip().splitlines()}
    assert {w: pair for w, pair in verdicts.items() if pair[0] != pair[1]} == {}
    assert len(set(verdicts.values())) > 10


@pytest.mark.parametrize("where", ESCAPES)
def test_a_text_that_closes_the_parentheses_is_a_syntax_error(database: Database, where: str) -> None:
    verdict = database.examined(where)
    assert verdict is not None
    assert verdict[0] == "42601"
    assert database.connection.execute("SELECT to_regclass('t') IS NOT NULL").fetchone() == (True,)


def test_a_collation_counts_as_built_in_by_its_schema(database: Database) -> None:
    assert parse_table_filter(database.table, "w < 'x'").columns == {"w"}
    with pytest.raises(UnsupportedFilterError, match="collation"):
        parse_table_filter(database.table, "v < 'x'")


ATOMS = [
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "g",
    "h",
    "i",
    "j",
    "k",
    "l",
    "m",
    "n",
    "o",
    "p",
    "q",
    "r",
    "s",
    "u",
    "1",
    "2.5",
    "'x'",
    "'1'",
    "NULL",
    "true",
    "t",
    "ctid",
    "e::text",
    "random()",
    "now()",
    "current_date",
    "'{1,2}'",
    "ARRAY[a]",
    "(g).a",
    "h[1]",
    "f::int",
    "mine(a)",
    "'sad'::mood",
    "'2020-01-01'::date",
    "'1'::jsonb",
]
OPERATORS = [
    "=",
    "<>",
    "<",
    ">",
    "<=",
    "+",
    "-",
    "*",
    "/",
    "||",
    "~",
    "LIKE",
    "AND",
    "OR",
    "<<<",
    "@>",
    "->",
    "->>",
]
SHAPES: tuple[Callable[[str, str, str], str], ...] = (
    lambda x, _y, _z: f"{x} IS NULL",
    lambda x, _y, _z: f"({x}) IS NOT TRUE",
    lambda x, _y, _z: f"NOT ({x})",
    lambda x, y, _z: f"({x}) IS DISTINCT FROM ({y})",
    lambda x, y, _z: f"COALESCE({x}, {y})",
    lambda x, y, z: f"GREATEST({x}, {y}, {z})",
    lambda x, y, _z: f"NULLIF({x}, {y})",
    lambda x, y, z: f"CASE WHEN {x} THEN {y} ELSE {z} END",
    lambda x, y, z: f"CASE {x} WHEN {y} THEN {z} END",
    lambda x, y, z: f"({x}) IN ({y}, {z})",
    lambda x, y, z: f"({x}) BETWEEN ({y}) AND ({z})",
    lambda x, y, z: f"ROW({x}, {y}) < ROW({z}, {x})",
    lambda x, y, _z: f"({x}) = ANY (ARRAY[{y}])",
    lambda x, y, _z: f"ARRAY[{x}, {y}]",
    lambda x, _y, _z: f'({x}) COLLATE "C"',
    lambda x, _y, _z: f"({x}) COLLATE own",
    lambda x, _y, _z: f"length({x})",
    lambda x, _y, _z: f"date_trunc('day', {x})",
    lambda x, _y, _z: f"abs({x})",
    lambda x, _y, _z: f"({x})::text",
    lambda x, _y, _z: f"({x})::int",
    lambda x, _y, _z: f"({x})::varchar",
    lambda x, _y, _z: f"({x})::positive",
    lambda x, _y, _z: f"EXISTS (SELECT {x})",
    lambda x, _y, _z: f"sum({x})",
)  # fmt: skip


def random_expression(r: random.Random, depth: int) -> str:
    if depth == 0 or r.random() < 0.15:
        return r.choice(ATOMS)
    x, y, z = (random_expression(r, depth - 1) for _ in range(3))
    if r.random() < 0.4:
        return f"({x}) {r.choice(OPERATORS)} ({y})"
    return r.choice(SHAPES)(x, y, z)


def random_condition(r: random.Random) -> str:
    """A random expression that is likely to be boolean."""
    expression = random_expression(r, r.choice((1, 1, 2, 2, 3)))
    return r.choice((expression, f"({expression}) IS NULL", f"a > 1 AND ({expression}) IS NOT NULL"))


def test_random_expressions_are_refused_where_create_publication_refuses_them(database: Database) -> None:
    seed = drawn_seed()
    r = random.Random(seed)
    verdicts: Counter[Verdict] = Counter()

    def is_enough() -> bool:
        return verdicts.total() >= 100 and bool(verdicts[None]) and len(verdicts) > 10

    for _ in drawing(budget_seconds(5), is_enough):
        where = random_condition(r)
        verdict = database.examined(where)
        assert verdict == database.server_says(where), f"{where} (PGSIEVE_SEED={seed})"
        verdicts[verdict] += 1
    print(
        f"drawn: seed {seed}, {verdicts.total()} expressions, {verdicts[None]} accepted, {len(verdicts)} verdicts"
    )
    assert is_enough()
