"""The case of letters in row filters, with PostgreSQL as the oracle: all letters that have case, and random text.

PGSIEVE_SEED repeats a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest

from pgsieve.decoding.row_filters.analysis import FilterColumn, parse_row_filter
from pgsieve.decoding.row_filters.evaluation.verdicts import compute_verdicts
from pgsieve.decoding.row_filters.letter_case import CaseMapping, make_mapping_finder
from pgsieve.resources.postgres.case_mappings import read_case_mapping
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.locales import locales
from tests.fixtures.tries import drawn_seed

SEED = drawn_seed()
#: Each row has its text and the server's lower, upper and initcap of it, so that a filter compares whole results.
TABLE = """CREATE TABLE sample (id int PRIMARY KEY, t text, l text, u text, i text, p char(6));
INSERT INTO sample SELECT n, t, lower(t), upper(t), initcap(t), left(t, 6) FROM unnest(%s::text[]) WITH ORDINALITY AS e (t, n)"""
FILTERS = [
    "lower(t) = l", "upper(t) = u", "initcap(t) = i", "initcap('x' || t || ' y') = i", "upper(lower(t)) = u",
    "lower(upper(t)) = l", "t ILIKE l", "t ILIKE u", "l ILIKE t", "t ILIKE 'a%' OR t ILIKE '%Σ'", "t ILIKE '_Ä%'",
    "t ILIKE '%ÉaAaa' ESCAPE 'a'", "t ILIKE '%ÉAaAA' ESCAPE 'A'", "p ILIKE 'ä%'", "p ILIKE '%  '", "t NOT ILIKE '%k%'",
    "t ~* 'ß|ẞ'", "t !~* '^[^à-þ]+$'", "t ~* '[Ǆ-ǌ]'", "t ~* '^ǅ'", "t ~* '[ǅ]$'", "t ~* '\\.σ|ς'", "lower(p) = 'ä'",
    "t ~* '[K-k]$'", "t ~* '(ı|i){2}'", "t ~* '[İ]'", "t ~* 'ä|k|s'", "t ~ 'x|[kK]|[sS]'", "initcap(t) ILIKE t AND upper(t) <> lower(t)",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        locale = next(iter(locales(admin).values()))
        admin.execute("DROP DATABASE IF EXISTS cases WITH (FORCE)")
        admin.execute(f"CREATE DATABASE cases TEMPLATE template0 {locale}".encode())
    with psycopg.connect(publisher_server.conninfo(dbname="cases"), autocommit=True) as connection:
        yield connection


def texts(rng: random.Random, letters: str, count: int) -> list[str]:
    """Each letter alone, and random text of letters and of characters between words."""
    around = [*letters, *"aAzZ09 -_.'%ÄÉéßΣσςK", "e\u0301", "\u212a", "ſ", "日", "😀", "\u00ad", "٣"]
    return [*letters, *("".join(rng.choices(around, k=rng.randint(0, 6))) for _ in range(count))]


def patterns(rng: random.Random, letters: str) -> list[str]:
    """Conditions that search each letter once, ignoring case, and ranges of letters."""
    shuffled = rng.sample(letters, len(letters))
    sets = ["".join(shuffled[start : start + 200]) for start in range(0, len(shuffled), 200)]
    ranges = ["-".join(sorted(rng.sample(letters, 2))) for _ in range(8)]
    return [f"t ~* '^[{members}]'" for members in (*sets, *ranges)] + [f"t ~* '{'|'.join(sets[0])}'"]


@pytest.mark.parametrize("drawn", [400, pytest.param(None, marks=pytest.mark.long)])
def test_case_changes_as_the_server_does(server: psycopg.Connection, drawn: int | None) -> None:
    """It tests `drawn` random letters, or all."""
    rng, mapping = random.Random(SEED), read_case_mapping(server, "default", with_initcap=True)
    letters = "".join(sorted({*mapping.lower[0], *mapping.upper[0]}))
    if drawn is not None:
        letters = "".join(sorted(rng.sample(letters, drawn)))
    with psycopg.ClientCursor(server) as cursor:
        cursor.execute("DROP TABLE IF EXISTS sample")
        cursor.execute(TABLE, [texts(rng, letters, drawn or 2000)])
    filters = [*FILTERS, *patterns(rng, letters)]
    expected = server.execute(f"SELECT {', '.join(filters)} FROM sample ORDER BY id".encode()).fetchall()
    results = evaluated(server, filters, mapping)
    for place, text in enumerate(filters):
        wrong = [n for n, row in enumerate(expected) if row[place] is not results[place][n]]
        assert not wrong, f"seed {SEED}: {text}: rows {wrong[:10]}"
        assert {row[place] for row in expected} <= {True, False}
    assert sum(row[0] for row in expected) == len(expected)


def evaluated(
    server: psycopg.Connection, filters: list[str], mapping: CaseMapping
) -> list[list[bool | None]]:
    """The verdict of each filter for each row."""
    names = {"t": 25, "l": 25, "u": 25, "i": 25, "p": 1042}
    columns = {
        name: FilterColumn(name, oid, 10 if name == "p" else -1, "default") for name, oid in names.items()
    }
    mappings = make_mapping_finder({"default": mapping})
    rows = server.execute("SELECT t, l, u, i, p FROM sample ORDER BY id").fetchall()
    batch = pa.record_batch([pa.array(each) for each in zip(*rows, strict=True)], names=list(names))
    parsed = [parse_row_filter(text, columns, "public.sample", mappings) for text in filters]
    return [compute_verdicts(each.tree, batch).to_pylist() for each in parsed]
