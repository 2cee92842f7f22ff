"""Case mappings read from the server, with the server as the oracle: every character, and random text.

PGSIEVE_SEED repeats a run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import psycopg
import pytest

from pgsieve.decoding.errors import UnsupportedFilterError
from pgsieve.decoding.publications.catalog import Catalog, Publication, PublicationTable
from pgsieve.decoding.publications.filters import parse_table_filter
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.decoding.row_filters.letter_case import ASCII, CaseFunction, CaseMapping
from pgsieve.resources.postgres.case_mappings import add_case_mappings, read_case_mapping
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.locales import locales
from tests.fixtures.tries import drawn_seed

pytestmark = pytest.mark.slow

SEED = drawn_seed()
DATABASE = "letters"
FUNCTIONS: tuple[CaseFunction, ...] = ("lower", "upper", "initcap")
CHARACTERS = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
TABLES = """
CREATE TABLE needing (id int PRIMARY KEY, t text, i text COLLATE unicode, c text COLLATE "C");
CREATE TABLE another (id int PRIMARY KEY, t text);
CREATE TABLE plain (id int PRIMARY KEY, t text);
"""


def database(server: EmbeddedServer, options: str, name: str = DATABASE) -> psycopg.Connection:
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0 {options}".encode())
    return psycopg.connect(server.conninfo(dbname=name), autocommit=True)


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    """A database in the C locale, with other collations."""
    with database(publisher_server, "LOCALE 'C'") as connection:
        connection.execute(TABLES)
        yield connection


def texts(rng: random.Random, mapping: CaseMapping) -> list[str]:
    """Random text of letters with case, and characters around them."""
    pool = [
        *mapping.lower[0],
        *mapping.upper[0],
        *"aAzZ09 -_.'Σσς",
        "e\u0301",
        "日",
        "😀",
        "\u00ad",
        "\u2019",
        "٣",
    ]
    return ["".join(rng.choices(pool, k=rng.randint(0, 8))) for _ in range(4000)]


def of_server(connection: psycopg.Connection, function: str, given: Sequence[str], collate: str) -> list[str]:
    query = f"SELECT {function}(c {collate}) FROM unnest(%s::text[]) WITH ORDINALITY AS e (c, n) ORDER BY n"
    return [row[0] for row in connection.execute(query.encode(), [list(given)])]


def compare_all(connection: psycopg.Connection, mapping: CaseMapping) -> None:
    """Compare every single character, under the database's collation."""
    for function in FUNCTIONS:
        row = connection.execute(
            f"SELECT string_agg({function}(chr(n)), '' ORDER BY n) FROM generate_series(1, 1114111) n"
            " WHERE n NOT BETWEEN 55296 AND 57343".encode()
        ).fetchone()
        assert row is not None
        assert row[0] == "".join(mapping.change(function, character) for character in CHARACTERS)


def compare(connection: psycopg.Connection, collation: str) -> CaseMapping:
    """Compare random text."""
    mapping = read_case_mapping(connection, collation, with_initcap=True)
    assert not mapping.refusal
    given = texts(random.Random(SEED), mapping)
    for function in FUNCTIONS:
        changed = [mapping.change(function, text) for text in given]
        expected = of_server(connection, function, given, f'COLLATE pg_catalog."{collation}"')
        assert changed == expected, f"seed {SEED}"
    return mapping


def matches(connection: psycopg.Connection, pairs: list[tuple[str, str]], collate: str) -> list[bool]:
    subjects, patterns = zip(*pairs, strict=True)
    query = f"SELECT s ~* (p {collate}) FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS e (s, p, n) ORDER BY n"
    return [row[0] for row in connection.execute(query.encode(), [list(subjects), list(patterns)])]


def compare_in_regular_expressions(connection: psycopg.Connection, collation: str) -> None:
    rng, mapping = random.Random(SEED), read_case_mapping(connection, collation, with_initcap=False)
    collate = f'COLLATE pg_catalog."{collation}"'
    letters = sorted({*mapping.lower[0], *mapping.lower[1], *mapping.upper[0], *mapping.upper[1]})
    pairs = []
    for letter in letters:
        alike = {
            letter,
            *mapping.list_variants(letter),
            *(v for c in mapping.list_variants(letter) for v in mapping.list_variants(c)),
        }
        pairs += [(other, letter) for other in (*alike, *rng.choices(letters, k=3))]
    expected = [other in mapping.list_variants(letter) for other, letter in pairs]
    assert expected == matches(connection, [(other, f"^{letter}$") for other, letter in pairs], collate), (
        f"seed {SEED}"
    )
    ranges = [sorted(rng.choices(letters, k=2)) for _ in range(60)]
    among = [(other, low, high) for low, high in ranges for other in rng.choices(letters, k=150)]
    expected = [low <= c <= high or c in mapping.list_range_variants(low, high) for c, low, high in among]
    patterns = [(other, f"^[{low}-{high}]$") for other, low, high in among]
    assert expected == matches(connection, patterns, collate), f"seed {SEED}"


@pytest.mark.drawn
@pytest.mark.slow
def test_every_character_of_the_database_changes_as_the_server_changes_it(
    publisher_server: EmbeddedServer, server: psycopg.Connection
) -> None:
    """Each character of Unicode, in each database."""
    there = locales(server)
    assert there, "there are no builtin locales and no libc locales with UTF-8"
    for options in there.values():
        with database(publisher_server, options, "localized") as connection:
            mapping = compare(connection, "default")
            compare_all(connection, mapping)
            assert len(mapping.lower[0]) > 1000
            if mapping.has_english_ascii_case():  # other locales are refused
                compare_in_regular_expressions(connection, "default")


@pytest.mark.drawn
def test_text_of_a_collation_changes_as_the_server_changes_it(server: psycopg.Connection) -> None:
    assert compare(server, "default") == ASCII
    assert compare(server, "ucs_basic") == ASCII
    if "builtin" in (names := {**locales(server)}):
        names["pg_c_utf8"] = names.pop("builtin")
    for name in names:
        compare(server, name)


def test_a_server_is_asked_once(server: psycopg.Connection) -> None:
    assert read_case_mapping(server, "default", with_initcap=True) is read_case_mapping(
        server, "default", with_initcap=True
    )


def test_mappings_that_depend_on_context_or_cannot_be_read_are_refused(
    publisher_server: EmbeddedServer, server: psycopg.Connection
) -> None:
    assert "ICU's" in read_case_mapping(server, "unicode", with_initcap=False).refusal
    assert (
        read_case_mapping(server, "no such", with_initcap=False).refusal
        == "the server does not say how (SQLSTATE 42704)"
    )
    if server.info.server_version >= 180000:
        assert (
            read_case_mapping(server, "pg_unicode_fast", with_initcap=False).refusal
            == "it makes several characters of one"
        )
    with database(publisher_server, "LOCALE 'C' ENCODING 'LATIN1'", "latin") as connection:
        assert (
            read_case_mapping(connection, "default", with_initcap=False).refusal
            == "the database's encoding is LATIN1, not UTF8"
        )


def published(catalog: Catalog, **filters: str) -> Catalog:
    """The catalog with a publication `p` of tables with these row filters."""
    tables = tuple(
        PublicationTable(catalog.table_by_name["public", name].oid, where) for name, where in filters.items()
    )
    return replace(catalog, publications={"p": Publication("p", tables=tables)})


def test_a_catalog_has_the_mappings_that_its_row_filters_need(server: psycopg.Connection) -> None:
    server_has = read_catalog(server)
    without = published(server_has, plain="t ~ 'x' OR length(t) > 3", needing="lower(c) = 'x' OR c ILIKE 'x'")
    assert add_case_mappings(server, without, ["p"]) is without
    assert "case_mappings" not in json.loads(catalog_to_json(without, ["p"]))

    catalog = published(
        server_has, needing="t ILIKE 'x'", another="id > 1 AND initcap(t) = 'X'", plain="t = 'x'"
    )
    assert add_case_mappings(server, catalog, ["another publication"]) is catalog
    mapped = add_case_mappings(server, catalog, ["p"])
    needs = {
        t.name: {name: m.words is not None for name, m in t.case_mappings} for t in mapped.tables.values()
    }
    assert needs == {"needing": {"default": False}, "another": {"default": True}, "plain": {}}


def test_a_recorded_catalog_keeps_each_mapping_once(server: psycopg.Connection) -> None:
    catalog = published(read_catalog(server), needing="lower(t) = 'x'", another="t ~* 'x'", plain="t = 'x'")
    catalog = add_case_mappings(server, catalog, ["p"])
    text = catalog_to_json(catalog, ["p"])
    assert list(json.loads(text)["case_mappings"]) == ["default"]
    assert catalog_from_json(text) == catalog
    assert catalog_from_json(text).table_by_name["public", "plain"].case_mappings == ()


def test_a_filter_that_cannot_be_evaluated_gives_the_reason(server: psycopg.Connection) -> None:
    catalog = published(read_catalog(server), needing="lower(i) = 'x'")
    table = add_case_mappings(server, catalog, ["p"]).table_by_name["public", "needing"]
    with pytest.raises(UnsupportedFilterError, match="collation unicode, and that is ICU's"):
        parse_table_filter(table, "lower(i) = 'x'")
    with pytest.raises(UnsupportedFilterError, match="the case of letters depends on the collation default"):
        parse_table_filter(table, "lower(t) = 'x'")  # no mapping was read for it
