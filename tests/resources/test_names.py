"""No name escapes from its place: folders of the lake, identifiers in the SQL of PostgreSQL and of Spark."""

from __future__ import annotations

import os

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.paths import escape, unescape
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import quote, quote_literal
from tests.fixtures.lakes import no_session

#: Names that PostgreSQL accepts: no NUL byte. The limit of 63 bytes is not checked here.
NAMES = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=20
)


LAKE = Lake("/the/lake", no_session)
PATHS = (LAKE.paths.replica, LAKE.paths.change_history)


@given(schema=NAMES, table=NAMES)
@example(schema="..", table="..")
@example(schema="../../etc", table="passwd")
@example(schema="/", table="\\..\\")
@example(schema="_delta_log", table=".")
def test_a_table_stays_in_its_subscriptions_folder(schema: str, table: str) -> None:
    for path in PATHS:
        made = path("sub", schema, table)
        assert os.path.normpath(made) == made
        *above, folder, name = made.split("/")
        assert "/".join(above).startswith("/the/lake/sub")
        assert (unescape(folder), unescape(name)) == (schema, table)
        assert not name.startswith(("_", ".")), "Spark hides such folders"


@given(names=st.lists(NAMES, min_size=2, max_size=2, unique=True))
def test_two_names_are_two_folders_even_if_case_is_ignored(names: list[str]) -> None:
    first, second = (escape(name) for name in names)
    assert first.lower() != second.lower()


@given(NAMES, NAMES, NAMES, NAMES)
@example("_changes", "s", "s", "t")
@example("a/b", "c", "a", "b/c")
def test_two_tables_never_share_a_folder_or_use_one_of_pgsieves_own(
    schema: str, table: str, other_schema: str, other_table: str
) -> None:
    names = {(schema, table), (other_schema, other_table)}
    own = (LAKE.paths.transformed_slices("sub"), LAKE.paths.table_states("sub"), LAKE.paths.cuts("sub"))
    paths = {*own, *(path("sub", *name) for path in PATHS for name in names)}
    assert len({path.lower() for path in paths}) == len(own) + len(PATHS) * len(names)


@pytest.mark.parametrize("name", ["Z" * 63, "/" * 63, "я" * 31, "🦆" * 15])
def test_a_name_of_63_bytes_is_a_folder_of_at_most_255(name: str) -> None:
    assert len(escape(name)) <= 255


def test_names_and_strings_reach_the_server_unchanged(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo(), client_encoding="UTF8") as connection:

        @given(
            name=NAMES, value=st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))
        )
        @example(name='"; drop table t; --', value="'; drop table t; --")
        @example(name="\\", value="\\' or true --")
        def asked(name: str, value: str) -> None:
            named = quote(name.encode()[:63].decode(errors="ignore") or "x")
            cursor = connection.execute(f"select {quote_literal(value)} as {named}")
            assert cursor.fetchone() == (value,)
            assert cursor.description is not None
            assert quote(cursor.description[0].name) == named

        asked()
