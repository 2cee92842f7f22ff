"""Every kind of session has the same settings, whatever the role's are, and gets the password."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from pgsieve.resources import passwords
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.passwords import (
    conceal_passwords,
    remember_conninfo,
    remember_password,
    remember_secrets,
)
from pgsieve.resources.postgres import password_command
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceError, SourceUnreachableError
from pgsieve.resources.postgres.filter_analysis import begin_analysis, read_filter_columns
from pgsieve.resources.postgres.peeks import read_messages
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import wait_until

TIMEOUTS = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process remembers every password. A password of another test may contain letters of messages here."""
    monkeypatch.setattr(passwords, "_secrets", set())
    monkeypatch.setattr(passwords, "_last_use_by_password", {})


@pytest.fixture
def conninfo(publisher_server: EmbeddedServer) -> Iterator[str]:
    """The conninfo of a role whose settings all differ."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create role limited login replication")
        admin.execute("grant create on database postgres to limited")
        admin.execute("alter role limited set search_path = 'public', 'pg_catalog'")
        admin.execute("alter role limited set datestyle = 'SQL'")
        for name, least in TIMEOUTS.items():
            if admin.info.server_version >= least:
                admin.execute(sql.SQL("alter role limited set {} = '7min'").format(sql.Identifier(name)))
        yield publisher_server.conninfo(user="limited")
        admin.execute("drop owned by limited")
        admin.execute("drop role limited")


def _plain(conninfo: str, query: str) -> str:
    with Source("shop", conninfo).connect() as connection:
        return str(connection.execute(query).fetchone())


def _walsender(conninfo: str, query: str) -> str:
    options = {"replication": "database", "cursor_factory": psycopg.ClientCursor}
    with Source("shop", conninfo).connect(**options) as connection:
        return str(connection.execute(query).fetchone())


def _executor(conninfo: str, query: str) -> str:
    for_executor = Source("shop", conninfo).make_executor_conninfo()
    with for_executor.connect_adbc() as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return str(cursor.fetchone())


KINDS: dict[str, Callable[[str, str], str]] = {
    "psycopg": _plain,
    "walsender": _walsender,
    "executor": _executor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_roles_settings_do_not_count(
    conninfo: str, publisher_server: EmbeddedServer, kind: str, postgres_version: int
) -> None:
    expected = {name: "0" for name, least in TIMEOUTS.items() if least <= postgres_version * 10000}
    expected |= {"search_path": "pg_catalog,pg_temp", "datestyle": "ISO, MDY"}
    shown = ", ".join(f"pg_catalog.current_setting('{name}')" for name in expected)
    answer = KINDS[kind](conninfo, f"select {shown}")
    assert answer.replace("pg_catalog, pg_temp", "pg_catalog,pg_temp") == str(tuple(expected.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["conninfo", "service"])
def test_no_timeout_of_the_roles_is_faster_than_a_session(
    publisher_server: EmbeddedServer,
    kind: str,
    place: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not even one of a millisecond. Messages of the server about such a role are not shown."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create role hasty login replication")
        admin.execute("grant create on database postgres to hasty")
        timeouts = [name for name, least in TIMEOUTS.items() if admin.info.server_version >= least]
        for name in timeouts:
            # The last timeout ends even the server's own start of a session.
            shortest = "200ms" if name == "transaction_timeout" else "1ms"
            admin.execute(sql.SQL("alter role hasty set {} = {}").format(sql.Identifier(name), shortest))
        admin.execute("alter role hasty set client_min_messages = 'debug5'")
        conninfo = publisher_server.conninfo(user="hasty")
        if place == "service":
            services = tmp_path_factory.mktemp("services") / "services"
            lines = "\n".join(f"{k}={v}" for k, v in conninfo_to_dict(conninfo).items())
            services.write_text(f"[hasty]\n{lines}\noptions=-c work_mem=5MB\n")
            monkeypatch.setenv("PGSERVICEFILE", str(services))
            conninfo = "service=hasty"
        shown = ", ".join(f"pg_catalog.current_setting('{name}')" for name in timeouts)
        expected = str(tuple("0" for _ in timeouts))
        slept = f"select {shown} from pg_catalog.pg_sleep(0.2)"
        try:
            for _ in range(5):
                assert KINDS[kind](conninfo, slept) == expected
        finally:
            admin.execute("drop owned by hasty")
            admin.execute("drop role hasty")
    assert "DEBUG" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["conninfo", "PGOPTIONS", "service"])
def test_the_users_own_options_count_except_pinned_ones(
    conninfo: str,
    kind: str,
    place: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = "-c lock_timeout=5000 -c work_mem=5MB -c search_path=public -c datestyle=German"
    if place == "conninfo":
        conninfo = f"{conninfo} options='{options}' keepalives_idle=17"
    elif place == "PGOPTIONS":
        monkeypatch.setenv("PGOPTIONS", options)
    else:
        services = tmp_path_factory.mktemp("services") / "services"
        lines = "\n".join(f"{k}={v}" for k, v in conninfo_to_dict(conninfo).items())
        services.write_text(f"[shop]\n{lines}\noptions={options}\n")
        monkeypatch.setenv("PGSERVICEFILE", str(services))
        conninfo = "service=shop"
    names = ("lock_timeout", "work_mem", "statement_timeout", "search_path", "datestyle")
    shown = ", ".join(f"pg_catalog.current_setting('{name}')" for name in names)
    answer = KINDS[kind](conninfo, f"select {shown}").replace("pg_catalog, pg_temp", "pg_catalog,pg_temp")
    assert answer == str(("5s", "5MB", "0", "pg_catalog,pg_temp", "ISO, MDY"))


def test_a_dead_peer_is_noticed(conninfo: str) -> None:
    with Source("shop", f"{conninfo} keepalives_idle=17").connect() as connection:
        parameters = connection.info.get_parameters()
    assert {k: v for k, v in parameters.items() if k.startswith(("keepalives", "tcp_"))} == {
        "keepalives": "1",
        "keepalives_idle": "17",
        "keepalives_interval": "10",
        "keepalives_count": "6",
        "tcp_user_timeout": "120000",
    }


def test_other_roles_objects_do_not_change_the_meaning_of_a_row_filter(conninfo: str) -> None:
    """The server prints a publication's filter, and reads the filters of pgsieve.yaml, by its own objects."""
    with psycopg.connect(conninfo, autocommit=True) as owner:
        owner.execute("create schema limited")
        owner.execute("create function limited.lower(text) returns text immutable return 'planted'")
        owner.execute("create function limited.same(text, text) returns bool immutable return true")
        owner.execute("create operator limited.= (leftarg = text, rightarg = text, function = limited.same)")
        owner.execute("create table limited.t (id int primary key, note text)")
        owner.execute("set search_path = pg_catalog")
        if owner.info.server_version >= 150000:
            owner.execute("create publication f for table limited.t where (lower(note) = 'a')")
        owner.execute("alter role limited set search_path = limited, pg_catalog")
    with Source("shop", conninfo).connect() as connection:
        catalog = read_catalog(connection)
        (table,) = [t for t in catalog.tables.values() if t.schema == "limited"]
        if connection.info.server_version >= 150000:
            (entry,) = catalog.publications["f"].tables
            assert entry.where == "(lower(note) = 'a'::text)"
        with begin_analysis(connection):
            for where in ("lower(note) = 'a'", "pg_catalog.lower(note) operator(pg_catalog.=) 'a'"):
                assert read_filter_columns(connection, table, where) == {"note"}
    with psycopg.connect(conninfo, autocommit=True) as owner:
        if owner.info.server_version >= 150000:
            owner.execute("drop publication f")


def test_a_session_that_ends_during_the_analysis_rejects_no_filter(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:

        def analyse() -> None:
            with Source("shop", publisher_server.conninfo()).connect() as connection:
                (table,) = [t for t in read_catalog(connection).tables.values() if t.name == "analysed"]
                with begin_analysis(connection):
                    admin.execute("select pg_terminate_backend(%s, 10000)", [connection.info.backend_pid])
                    read_filter_columns(connection, table, "id > 1")

        admin.execute("create table public.analysed (id int primary key)")
        try:
            with pytest.raises(SourceUnreachableError):
                analyse()
        finally:
            admin.execute("drop table public.analysed")


@pytest.fixture
def with_passwords(publisher_server: EmbeddedServer) -> Iterator[str]:
    """A server that demands the password of the role `secured`, which is `new%@ pa'ss"`."""
    access = publisher_server.data_path / "pg_hba.conf"
    before = access.read_text()
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("set password_encryption = 'scram-sha-256'")
        admin.execute("create role secured login replication password 'new%@ pa''ss\"'")
        access.write_text(f"host all secured 127.0.0.1/32 scram-sha-256\n{before}")
        admin.execute("select pg_reload_conf()")
        time.sleep(0.2)
        yield publisher_server.conninfo(user="secured")
        access.write_text(before)
        admin.execute("select pg_reload_conf()")
        admin.execute("drop role secured")


def _connect_everywhere(source: Source) -> None:
    with source.connect() as connection, source.connect(replication="database"):
        connection.execute("select 1")
    with source.make_executor_conninfo().connect_adbc() as connection, connection.cursor() as cursor:
        cursor.execute("select 1")


def test_a_separate_password_may_have_any_character(with_passwords: str) -> None:
    with pytest.raises(SourceUnreachableError, match="no password supplied"):
        _connect_everywhere(Source("shop", with_passwords))
    _connect_everywhere(Source("shop", with_passwords, "new%@ pa'ss\""))


def test_a_password_command_is_run_for_each_session(
    with_passwords: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = tmp_path_factory.mktemp("command") / "runs"
    program = "import sys; open(sys.argv[1], 'a').write('.'); print('new%@ pa\\'ss\"')"
    source = Source("shop", with_passwords, None, (sys.executable, "-c", program, str(runs)))
    _connect_everywhere(source)
    assert runs.read_text() == "." * 4
    for_executor = source.make_executor_conninfo()
    assert "new%" not in for_executor.text
    assert "new%" not in repr(for_executor)


def test_a_password_command_gets_the_token_that_the_lakes_requests_do_not(
    with_passwords: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new%@ pa'ss\"")
    Store.from_storage(
        Storage.from_address("s3://bucket/lake", {"access_key_id": "AKIA7", "secret_access_key": "own"})
    )
    program = "import os; print(os.environ['AWS_SESSION_TOKEN'])"
    with Source("shop", with_passwords, None, (sys.executable, "-c", program)).connect() as connection:
        connection.execute("select 1")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('secret'); sys.exit('more secret')", "ended with status 1"),
        ("pass", "printed no password"),
        ("import time; print('secret', flush=True); time.sleep(60)", "did not end within"),
        ("import os; os.write(1, b'secret \\xff')", "printed bytes that are not UTF-8"),
    ],
)
def test_a_failing_password_command_shows_nothing_of_its_output(
    with_passwords: str,
    program: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(password_command, "PASSWORD_SECONDS", 1.0)
    source = Source("shop", with_passwords, None, (sys.executable, "-c", program))
    with pytest.raises(SourceUnreachableError) as raised, source.connect():
        pass
    assert reason in raised.value.message
    assert "secret" not in str(raised.value) + "".join(capfd.readouterr())
    assert (raised.value.__cause__, raised.value.__suppress_context__) == (None, True)


def test_a_missing_password_command_is_reported(with_passwords: str) -> None:
    source = Source("shop", with_passwords, None, (f"{os.sep}missing-secret",))
    with (
        pytest.raises(SourceUnreachableError, match="cannot be run: No such file") as raised,
        source.connect(),
    ):
        pass
    assert "missing-secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("conninfo", "message", "shown"),
    [
        ("host=db password=abcdef", 'no role "abcdef"', 'no role "..."'),
        ("host=db password=abcdef", 'no role "xbcdex", abc', 'no role "x...x", abc'),
        ("host=db oauth_client_secret=abcdef", 'no "abcdef"', 'no "..."'),
        ("host=db scram_client_key=abcdef", 'no "abcdef"', 'no "..."'),
        ("host=db scram_server_key=abcdef", 'no "abcdef"', 'no "..."'),
        ("host=db password=ab", 'ab is "ab", abc', '... is "...", abc'),
        ("postgresql://me:ab@cdef@db/shop", 'no host "cdef@db"', 'no host "...@db"'),
        ("postgresql://me:abcd/efgh@db/shop", 'invalid port "abcd"', 'invalid port "..."'),
        ("postgresql://me:ab%40%20cdef@db/shop", 'no "b@ c"', 'no "..."'),
        ("host=db", "nothing is secret", "nothing is secret"),
    ],
)
def test_four_characters_of_a_password_are_not_shown(conninfo: str, message: str, shown: str) -> None:
    remember_conninfo(conninfo)
    assert conceal_passwords(message) == shown


def test_many_passwords_of_a_command_displace_no_secret_that_is_in_use() -> None:
    """A password command makes a password for each connection: these would fill the memory of a follower."""
    remember_secrets("key of the store")
    for number in range(300):
        remember_conninfo("host=db password=of-the-source")
        remember_password(f"{number:04}-{number:04}")
    message = "of-the-source, key of the store, 0299-0299"
    assert conceal_passwords(message) == "..., ..., ..."
    assert conceal_passwords("0004-0004") == "0004-0004"


@pytest.mark.parametrize(
    ("statement", "sqlstate", "shown"),
    [
        ("select 'a cell of hunter22'::int", "22P02", "invalid input syntax for type integer: ..."),
        ("select * from nobody", "42P01", 'relation "nobody" does not exist'),
        ("do $$begin raise 'the password is hunter22'; end$$", "P0001", "the password is ..."),
    ],
)
def test_a_servers_error_becomes_pgsieves_error_without_value_and_password(
    publisher_server: EmbeddedServer, statement: str, sqlstate: str, shown: str
) -> None:
    source = Source("shop", publisher_server.conninfo(), "hunter22")
    with pytest.raises(SourceError) as refused, source.connect() as connection:
        connection.execute(statement)
    assert refused.value.sqlstate == sqlstate
    assert shown in refused.value.message
    assert "hunter22" not in "".join(traceback.format_exception(refused.value))


_READS = """
import sys
from pgsieve.resources.postgres.source import Source
with Source("shop", sys.argv[1]).make_executor_conninfo().connect_adbc() as session, session.cursor() as cursor:
    cursor.execute("select 'a reader that is killed', pg_sleep(600)")
"""
_READERS = "select pid from pg_stat_activity where query like '%a reader that is killed%' and pid <> pg_backend_pid()"


def test_the_server_ends_the_queries_of_a_killed_process(
    publisher_server: EmbeddedServer,
) -> None:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as database:
        reader = subprocess.Popen([sys.executable, "-c", _READS, publisher_server.conninfo()])
        try:
            wait_until(lambda: database.execute(_READERS).rowcount == 1, lambda: "it does not begin")
        finally:
            reader.kill()
            reader.wait()
        wait_until(lambda: database.execute(_READERS).rowcount == 0, lambda: "it goes on", seconds=20)


def test_a_users_own_setting_counts(publisher_server: EmbeddedServer) -> None:
    source = Source("shop", publisher_server.conninfo(options="-c client_connection_check_interval=7000"))
    with source.make_executor_conninfo().connect_adbc() as session, session.cursor() as cursor:
        cursor.execute("select current_setting('client_connection_check_interval')")
        assert cursor.fetchone() == ("7s",)


def test_an_interruption_ends_a_query_and_is_not_an_error_of_the_server(
    publisher_server: EmbeddedServer,
) -> None:
    """The driver once turned SIGINT into a cancelled query of the main thread: the run went on, and read the slot again."""
    reading = Source("shop", publisher_server.conninfo()).make_executor_conninfo()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        begin = time.monotonic()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(read_messages(reading, "select 'data'::bytea as data from pg_sleep(60)"))
        assert time.monotonic() - begin < 20
    finally:
        signal.signal(signal.SIGINT, before)
