"""Row filters that change or ignore the case of letters (sections 9.4, 9.7 and 23.2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.locales import locales
from tests.fixtures.oracle import Scenario

pytestmark = pytest.mark.spark

#: Letters with another case, letters without one, and letters whose case depends on the language or the context.
EMAILS = [
    "anna@example.org", "Anna@Example.org", "ÄNNA@EXAMPLE.ORG", "änna@example.org", "Straße", "STRASSE", "ΟΔΟΣ", "οδος",
    "οδοσ", "İSTANBUL", "istanbul", "ıstanbul", "Ǆungla", "ǅungla", "ǆungla", "𐐀bc", "𐐨bc", "\N{KELVIN SIGN}elvin",
    "kelvin", "１ａ", "日本", "", "e\u0301a", "ÉA", "éa",
]  # fmt: skip
FILTERS = {
    "changed": "lower(email) IN ('anna@example.org', 'änna@example.org', 'οδοσ', '𐐨bc', 'kelvin')"
    " OR upper(email) = 'ÉA' OR initcap(email) IN ('Straße', 'ǅungla', 'Ǆungla')",
    "alike": "email ILIKE 'ÄNNA%' OR email ILIKE '_ΔΟ_' OR email ~* '^[à-ö]nna' OR email ~* 'ǆ|^é'",
}


@pytest.fixture
def localized(
    publisher_server: EmbeddedServer, subscriber_server: EmbeddedServer, tmp_path: Path
) -> Iterator[Scenario]:
    with psycopg.connect(publisher_server.conninfo()) as connection:
        locale = next(iter(locales(connection).values()))
    with Scenario(publisher_server, subscriber_server, tmp_path, locale=locale) as made:
        yield made


def inserted(first: int) -> str:
    values = ", ".join(f"({number}, '{email}')" for number, email in enumerate(EMAILS, first))
    return "; ".join(f"INSERT INTO {table} VALUES {values}" for table in FILTERS)


@pytest.mark.drawn
def test_letters_have_the_case_of_the_database(localized: Scenario) -> None:
    for table in FILTERS:
        localized.tables(f"CREATE TABLE {table} (id int PRIMARY KEY, email text)")
        localized.publisher(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    published = ", ".join(f"{table} WHERE ({where})" for table, where in FILTERS.items())
    localized.publisher(f"CREATE PUBLICATION pub FOR TABLE {published}")
    localized.publisher(inserted(1))
    localized.subscribe("pub")
    localized.publisher(inserted(101))
    for table in FILTERS:
        localized.publisher(
            f"UPDATE {table} SET email = upper(email) WHERE id % 3 = 0;"
            f" UPDATE {table} SET email = 'no one' WHERE id % 5 = 0; UPDATE {table} SET email = 'éÄ' WHERE id % 11 = 0"
        )
    localized.check()
    assert localized.builtin is not None
    for table in FILTERS:
        assert 10 <= len(localized.builtin.rows("public", table)) < 2 * len(EMAILS) - 10
