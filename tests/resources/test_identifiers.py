"""Any identifier of PostgreSQL becomes exactly one folder of the lake and one quoted name.

PostgreSQL documentation, Identifiers and Key Words.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgsieve.pipelines.config.values import make_slot_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.paths import escape, unescape
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import quote, quote_literal
from tests.fixtures.names import WORST

#: Up to NAMEDATALEN - 1 bytes of any characters except NUL.
IDENTIFIERS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=63).filter(
    lambda name: len(name.encode()) <= 63
)
LAKE = Lake("/lake", lambda: pytest.fail("paths need no Spark"))


def folded(path: str) -> str:
    """A path as seen by a file system that ignores case and composes characters."""
    return unicodedata.normalize("NFC", path).casefold()


@given(IDENTIFIERS)
def test_a_folder_name_is_plain_and_reversible(name: str) -> None:
    folder = escape(name)
    assert unescape(folder) == name
    # Spark and Delta hide names with these first characters. File systems allow 255 bytes.
    assert re.fullmatch(r"[a-z0-9~A-F][a-z0-9_~A-F]*", folder)
    assert len(folder) <= 255


@given(IDENTIFIERS, IDENTIFIERS, IDENTIFIERS, IDENTIFIERS)
@example("a", "B", "A", "b")
@example("_changes", "s", "s", "t")
@example("~5F", "t", "_", "t")
@example("é", "t", "e\u0301", "t")
@example("a/b", "c", "a", "b/c")
def test_two_tables_never_share_a_folder(schema: str, table: str, schema2: str, table2: str) -> None:
    paths = [LAKE.paths.replica("sub", schema, table), LAKE.paths.change_history("sub", schema, table)]
    others = [LAKE.paths.replica("sub", schema2, table2), LAKE.paths.change_history("sub", schema2, table2)]
    for path in [*paths, *others]:
        # Exactly two folders below the subscription's folder, or below its _changes.
        below = PurePosixPath(path).relative_to("/lake/sub").parts
        assert len(below) - below.count("_changes") == 2
        assert not {"..", "."} & set(below)
    reserved = [LAKE.paths.transformed_slices("sub"), LAKE.paths.table_states("sub"), LAKE.paths.cuts("sub")]
    distinct = {*paths, *others, *reserved}
    assert len(distinct) == (5 if (schema, table) == (schema2, table2) else 7)
    assert len({folded(path) for path in distinct}) == len(distinct)


@given(IDENTIFIERS)
def test_slot_names_are_accepted_by_the_server(name: str) -> None:
    # ReplicationSlotValidateName in src/backend/replication/slot.c
    assert re.fullmatch(r"[a-z0-9_]{1,63}", make_slot_name("source", name))


@pytest.mark.parametrize("name", WORST)
def test_the_server_reads_a_quoted_name_unchanged(publisher_server: EmbeddedServer, name: str) -> None:
    with psycopg.connect(publisher_server.conninfo()) as connection:
        connection.execute(f"CREATE TEMPORARY TABLE {quote(name)} ({quote(name)} int)")
        columns = connection.execute(
            f"SELECT relname::text, attname::text FROM pg_class JOIN pg_attribute ON attrelid = oid AND attnum > 0 "
            f"WHERE relname = {quote_literal(name)} AND attrelid = {quote_literal(quote(name))}::regclass"
        ).fetchall()
        assert columns == [(name, name)]
        assert connection.execute(f"SELECT {quote_literal(name)}").fetchone() == (name,)
        connection.rollback()
