"""Names, quotes and times are written as the server writes them. The server is asked for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgsieve.decoding.values import catalog_names
from pgsieve.decoding.values.catalog_names import KEYWORDS, TYPE_NAMES
from pgsieve.decoding.values.output_datetimes import format_timestamptz
from pgsieve.decoding.values.quoting import quote_identifier, quote_literal, quote_qualified
from pgsieve.resources.postgres.embedded import EmbeddedServer

ROOT = Path(__file__).parents[3]
TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("abz_09\"'\\$A"),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def session(publisher_server: EmbeddedServer):
    with psycopg.connect(publisher_server.conninfo(client_encoding="UTF8"), autocommit=True) as connection:
        yield connection


def test_the_module_equals_the_output_of_its_script():
    script = ROOT / "scripts" / "catalog_names.py"
    written = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, check=True
    )
    assert written.stdout.decode() == Path(catalog_names.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("server", ["publisher_server", "decoding_server", "publisher_19"])
def test_older_servers_have_no_other_names(server, request):
    with psycopg.connect(request.getfixturevalue(server).conninfo()) as connection:
        named = connection.execute(
            "SELECT oid::bigint, format_type(oid, NULL) FROM pg_type WHERE oid < 10000 AND typtype <> 'p'"
        ).fetchall()
        words = connection.execute("SELECT word FROM pg_get_keywords() WHERE catcode <> 'U'").fetchall()
    assert set(named) <= set(TYPE_NAMES.items())
    assert {word for (word,) in words} <= KEYWORDS


@pytest.mark.parametrize("server", ["publisher_server", "decoding_server", "publisher_19"])
def test_every_keyword_is_quoted_as_the_server_quotes_it(server, request):
    with psycopg.connect(request.getfixturevalue(server).conninfo()) as connection:
        version = connection.info.server_version
        rows = connection.execute(
            "SELECT word, quote_ident(word) FROM (SELECT word FROM pg_get_keywords() UNION SELECT unnest(%s::text[])) w",
            [list(KEYWORDS)],
        ).fetchall()
    assert [(word, quote_identifier(word, version)) for word, _ in rows] == rows


@settings(max_examples=50)
@given(st.lists(TEXT, min_size=30, max_size=60))
def test_text_is_quoted_as_the_server_quotes_it(session, texts):
    rows = session.execute(
        "SELECT quote_ident(t), quote_literal(t), format('%%I.%%I', t, t) FROM unnest(%s::text[]) WITH ORDINALITY x(t, n)"
        " ORDER BY n",
        [texts],
    ).fetchall()
    assert [(quote_identifier(t), quote_literal(t), quote_qualified(t, t)) for t in texts] == rows


FIRST, LAST = -211813488000000000, 9223371331200000000 - 1  # 4714-11-24 BC, and the end of the year 294276


@settings(max_examples=50)
@given(
    st.lists(
        st.integers(FIRST, LAST)
        | st.integers(-(10**17), 10**17)
        | st.integers(-(10**9), 10**9).map(lambda n: n * 10**6),
        min_size=30,
        max_size=60,
    )
)
def test_times_are_printed_as_the_server_prints_them(session, times):
    # timestamptz_recv takes the microseconds unchanged.
    sent = [time.to_bytes(8, "big", signed=True) for time in [*times, -(2**63), 2**63 - 1]]
    session.execute("SET timezone = 'UTC'")
    with session.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE IF NOT EXISTS times (n serial, t timestamptz)")
        cursor.execute("TRUNCATE times RESTART IDENTITY")
        with cursor.copy("COPY times (t) FROM STDIN (FORMAT binary)") as copy:
            for data in sent:
                copy.write_row([data])
        rows = cursor.execute("SELECT t::text FROM times ORDER BY n").fetchall()
    assert [format_timestamptz(time) for time in [*times, -(2**63), 2**63 - 1]] == [text for (text,) in rows]
