"""pgsieve's output plugins write the same as the server's for the same WAL.

PostgreSQL is the oracle. Two slots, one with pgoutput and one with test_decoding, consume the same random workload. pgsieve's
test_decoding turns the first one's messages into text, which must equal the second one's, line by line. The allowed differences are in
`pgsieve.decoding.plugins.test_decoding`; here they are only the two kinds of lines that `comparable` removes.

The random workloads take half of PGSIEVE_BUDGET_SECONDS (30). PGSIEVE_SEED is the first one's seed.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

from pgsieve.decoding.plugins import pgoutput, test_decoding
from pgsieve.decoding.plugins.driver import PluginDriver, read_binary_changes, read_text_changes
from pgsieve.decoding.plugins.interface import OutputPluginOptionError, OutputTypeError
from pgsieve.decoding.protocol.messages import (
    BeginPrepare,
    Decoder,
    Delete,
    Insert,
    Message,
    Prepare,
    Relation,
    RollbackPrepared,
    Truncate,
    Type,
    Update,
)
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import read_type_names
from pgsieve.resources.postgres.sessions import OUTPUT_SETTINGS
from tests.fixtures.decoded_workloads import SCHEMA, RandomTables, transaction
from tests.fixtures.tries import budget_seconds, try_workloads

Options = dict[str, str]
Connection = psycopg.Connection[tuple[object, ...]]

PLAIN, PREPARED = ("td", "po"), ("td2", "po2")
PUBLISHED = {"publication_names": '"everything"', "messages": "true"}


class Database:
    """A database with a pair of slots, and another pair with two_phase."""

    def __init__(self, server: EmbeddedServer, name: str) -> None:
        settings = " ".join(f"-c {k}={v}" for k, v in OUTPUT_SETTINGS.items() if k != "client_encoding")
        self._conninfo = server.conninfo(dbname=name, options=settings, client_encoding="UTF8")
        self.session = self.connect()
        self.reader = self.connect()
        self.reader.execute("SET search_path = ''")  # as in pg_recvlogical
        for statement in [*SCHEMA, "CREATE PUBLICATION everything FOR ALL TABLES"]:
            self.session.execute(statement)

    def connect(self) -> Connection:
        return psycopg.connect(self._conninfo, autocommit=True)

    def create_slots(self, *names: str) -> None:
        for name in names:
            plugin = "test_decoding" if name.startswith("td") else "pgoutput"
            self.session.execute(
                "SELECT pg_create_logical_replication_slot(%s, %s, false, %s)",
                [f"{self.session.info.dbname}_{name}", plugin, name.endswith("2")],
            )

    def peek(self, slot: str, function: str, options: Options) -> list[object]:
        flat = [text for item in options.items() for text in item]
        marks = sql.SQL("").join([sql.SQL(", %s")] * len(flat))
        query = sql.SQL("SELECT data FROM {}(%s, NULL, NULL{})").format(sql.Identifier(function), marks)
        name = f"{self.session.info.dbname}_{slot}"
        return [row[0] for row in self.reader.execute(query, [name, *flat])]

    def theirs(self, slot: str, options: Options) -> list[str]:
        return [str(line) for line in self.peek(slot, "pg_logical_slot_peek_changes", options)]

    def messages(self, slot: str, **options: str) -> list[bytes]:
        parameters = {"proto_version": "3", **PUBLISHED, **options}
        return [bytes(data) for data in self.peek(slot, "pg_logical_slot_peek_binary_changes", parameters)]

    def ours(self, slot: str, options: Options, *, streaming: str = "off") -> list[str]:
        version = self.session.info.server_version
        names = read_type_names(self.session)
        with PluginDriver(
            test_decoding.init, list(options.items()), server_version=version, type_names=names
        ) as driver:
            return list(read_text_changes(driver, self.messages(slot, streaming=streaming)))

    def partitioned(self) -> list[str]:
        names = self.reader.execute("SELECT oid::regclass::text FROM pg_class WHERE relkind = 'p'")
        return [str(name) for (name,) in names]

    def compare(self, slots: tuple[str, str], options: Options, *, streaming: str = "off") -> int:
        theirs = comparable(self.theirs(slots[0], options), self.partitioned())
        ours = comparable(self.ours(slots[1], options, streaming=streaming), [])
        assert ours == theirs, f"options {options}"
        return len(ours)

    def run(self, statements: Sequence[str], end: str = "COMMIT", session: Connection | None = None) -> None:
        """Run a transaction. A failing statement is rolled back, as an application would do."""
        session = session or self.session
        session.execute("BEGIN")
        for statement in statements:
            print(f"    {statement};")
            if statement.startswith(("SAVEPOINT", "ROLLBACK TO")):
                session.execute(statement)
                continue
            session.execute("SAVEPOINT statement")
            try:
                session.execute(statement)
            except psycopg.Error as error:
                print(f"    -- {error}")
                session.execute("ROLLBACK TO SAVEPOINT statement")
            session.execute("RELEASE SAVEPOINT statement")
        print(end)
        session.execute(end)


def comparable(lines: list[str], partitioned: list[str]) -> list[str]:
    """The lines except those that pgoutput cannot give: empty transactions, and partitioned tables in a TRUNCATE."""
    kept: list[str] = []
    for line in lines:
        if re.match(r"COMMIT( \d+)?( \(at |$)", line) and kept and re.match(r"BEGIN( \d+)?$", kept[-1]):
            kept.pop()
        else:
            kept.append(_without(partitioned, line))
    return kept


def _without(partitioned: list[str], line: str) -> str:
    head, separator, flags = line.partition(": TRUNCATE:")
    if not separator:
        return line
    tables = head.removeprefix("table ").split(", ")
    left = [table for table in tables if table not in partitioned]
    return f"table {', '.join(left)}{separator}{flags}"


@pytest.fixture
def database(decoding_server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    with made(decoding_server, f"plugins_{abs(hash(request.node.name)) % 10**9}") as own_database:
        yield own_database


@contextmanager
def made(server: EmbeddedServer, name: str) -> Iterator[Database]:
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        database = Database(server, name)
        try:
            yield database
        finally:
            for (gid,) in database.session.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = %s", [name]
            ).fetchall():
                database.session.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
            database.session.close()
            database.reader.close()
            admin.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s",
                [name],
            )
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


OPTIONS = {
    "include-xids": ["on", "off"],
    "include-timestamp": ["true", "no"],
    "skip-empty-xacts": ["1", "0"],
    "only-local": ["yes"],
    "include-rewrites": ["f"],
    "force-binary": ["0"],
}


def random_options(source: random.Random) -> Options:
    names = source.sample(list(OPTIONS), source.randint(0, len(OPTIONS)))
    return {name: source.choice(OPTIONS[name]) for name in names}


def random_workload(source: random.Random, database: Database, slots: Sequence[str], *, undone: bool) -> None:
    """Transactions, some of them prepared. With `undone`, some are rolled back as a whole or in part."""
    tables = RandomTables(source)
    for definition in tables.definitions:
        print(f"{definition};")
        database.session.execute(definition)
    database.create_slots(*slots)
    for number in range(source.randint(1, 8)):
        end = source.choices(
            ["COMMIT", "ROLLBACK", "COMMIT PREPARED", "ROLLBACK PREPARED"], [6, undone, 2, undone]
        )[0]
        # If a transaction was rolled back after its PREPARE, decoding stops when it notices, or fails if a file is missing. `_nodecode`
        # delays decoding to the commit.
        gone = end == "ROLLBACK PREPARED"
        statements = transaction(source, tables, files_change=not gone, undone=undone)
        if source.random() < 0.2:
            statements.append(tables.large())
        gid = f"{database.session.info.dbname} {number}" + "_nodecode" * gone
        gid += source.choice(["", "it's", "_nodecode", "\\"])
        literal = sql.Literal(gid).as_string(None)
        prepared = end.endswith("PREPARED")
        database.run(statements, f"PREPARE TRANSACTION {literal}" if prepared else end)
        if prepared:
            database.session.execute(f"{end} {literal}")
    # The commit flushes the WAL. Unflushed WAL would be decoded only by the second peek.
    database.session.execute("SELECT pg_logical_emit_message(true, 'the', 'end')")


def compared_lines(source: random.Random, database: Database) -> int:
    """Run a workload, and compare every way to read it. Return how many lines were compared."""
    undone = source.random() < 0.5
    random_workload(source, database, [*PLAIN, *PREPARED], undone=undone)
    database.reader.execute("SET logical_decoding_work_mem = '64kB'")
    lines = 0
    for slots in (PLAIN, PREPARED):
        lines += database.compare(slots, {})
        lines += database.compare(slots, random_options(source))
        lines += database.compare(slots, random_options(source), streaming="on")
        if not undone:
            streamed = random_options(source) | {"stream-changes": "on"}
            lines += database.compare(slots, streamed, streaming="on")
    return lines


@pytest.mark.timeout(0)  # one workload ends whatever the budget, however busy the machine is
def test_random_workloads_print_the_servers_lines(decoding_server: EmbeddedServer) -> None:
    try_for(decoding_server, 1 / 4, compared_lines, "lines")


def try_for(
    server: EmbeddedServer, share: float, compare: Callable[[random.Random, Database], int], what: str
) -> None:
    """Compare random workloads for a share of the budget."""

    def compared(seed: int) -> int:
        with made(server, f"plugins_{seed}") as database:
            return compare(random.Random(seed), database)

    try_workloads(compared, budget_seconds(30) * share, what)


# pgoutput


def recoded(messages: list[bytes], options: Options, *, parallel: bool = False) -> list[bytes]:
    with PluginDriver(pgoutput.init, list(options.items()), parallel=parallel) as driver:
        return list(read_binary_changes(driver, messages))


def described(messages: list[bytes]) -> list[tuple[Message, list[Relation]]]:
    """All messages except descriptions, each change with the latest descriptions of its relations."""
    decoder = Decoder()
    relations: dict[int, Relation] = {}
    described_changes: list[tuple[Message, list[Relation]]] = []
    for data in messages:
        message = decoder.decode(data)
        match message:
            case Relation():
                relations[message.relation_id] = message
            case Insert() | Update() | Delete():
                described_changes.append((message, [relations[message.relation_id]]))
            case Truncate():
                described_changes.append((message, [relations[each] for each in message.relation_ids]))
            case Type():
                pass
            case _:
                described_changes.append((message, []))
    # How much of a rolled-back prepared transaction was sent depends on when the server noticed.
    gone = {message.gid for message, _ in described_changes if isinstance(message, RollbackPrepared)}
    kept: list[tuple[Message, list[Relation]]] = []
    prepared = None
    for message, of in described_changes:
        if isinstance(message, BeginPrepare | Prepare):
            prepared = message.gid if isinstance(message, BeginPrepare) else None
        if prepared not in gone:
            kept.append((message, of))
    return kept


def compared_messages(source: random.Random, database: Database) -> int:
    """Streamed and prepared messages, rewritten as plain ones, equal the server's plain messages."""
    undone = source.random() < 0.7
    random_workload(source, database, ["po", "po2"], undone=undone)
    database.reader.execute("SET logical_decoding_work_mem = '64kB'")
    # A message in a streamed subtransaction has the transaction's id, so its rollback cannot be noticed.
    emitted = "false" if undone else "true"
    newest = database.session.info.server_version >= 160000
    best = (
        {"proto_version": "4", "streaming": "parallel"}
        if newest
        else {"proto_version": "3", "streaming": "on"}
    )
    total = 0
    for slot, wanted in (
        ("po", {"proto_version": "1"}),
        ("po2", {"proto_version": "3", "two_phase": "on"}),
    ):
        plain = database.messages(slot, proto_version=wanted["proto_version"], messages=emitted)
        streamed = database.messages(slot, **{**best, "messages": emitted})
        options = {**wanted, "messages": emitted}
        assert described(recoded(streamed, options, parallel=newest)) == described(plain)
        again = recoded(streamed, {**best, "messages": emitted, "two_phase": "on"}, parallel=newest)
        assert undescribed(again) == undescribed(streamed)
        total += len(plain)
    return total


def undescribed(messages: list[bytes]) -> list[bytes]:
    """All messages except descriptions, and except aborts of unsent transactions."""
    begun = {data[1:5] for data in messages if data[:1] == b"S"}
    return [
        data for data in messages if data[:1] not in (b"R", b"Y") and (data[:1] != b"A" or data[1:5] in begun)
    ]


@pytest.mark.parametrize("server", ["decoding_server", "publisher_server"])
def test_pgoutput_rewrites_streamed_and_prepared_messages_as_plain_ones(
    server: str, request: pytest.FixtureRequest
) -> None:
    try_for(request.getfixturevalue(server), 1 / 8, compared_messages, "messages")


# Each option alone, on a workload for which each of them makes a difference.

WORKLOAD = [
    ["INSERT INTO t VALUES (1, repeat('0123456789', 1000), 'sad', '{sad}', '(1,x)', '{Happy}', 5)"],
    ["UPDATE t SET id = 2", "UPDATE t SET id = 3, amount = NULL", "DELETE FROM t"],
    ["SELECT pg_logical_emit_message(true, 'alone', 'in a transaction')"],
    ["SELECT pg_logical_emit_message(false, 'at', 'once')"],
    ["CREATE TABLE later (a int)"],
    ["INSERT INTO full_row VALUES (1, NULL, 'x')", "UPDATE full_row SET b = 2", "DELETE FROM full_row"],
    ["INSERT INTO full_row VALUES (2, NULL, 'y')"],
    ["ALTER TABLE full_row ALTER COLUMN a TYPE bigint", "INSERT INTO full_row VALUES (3, NULL, 'z')"],
    ["TRUNCATE t, full_row RESTART IDENTITY CASCADE"],
    ["TRUNCATE t"],
    [
        "SELECT pg_replication_origin_xact_setup('0/AABB', '2020-01-01 00:00+00')",
        "INSERT INTO t VALUES (8)",
    ],
]


@pytest.fixture(scope="module")
def worked(decoding_server: EmbeddedServer) -> Iterator[Database]:
    """A database after the workload. Its last transaction came by replication."""
    with made(decoding_server, "plugins_worked") as database:
        run_workload(database)
        yield database


def run_workload(database: Database) -> None:
    for definition in (
        """CREATE TABLE t (id int PRIMARY KEY, "user" text, mood mood, moods mood[], pair pair,
           "Moods" "Odd Types"."Mood"[], amount numeric)""",
        'ALTER TABLE t ALTER COLUMN "user" SET STORAGE EXTERNAL',
        "CREATE TABLE full_row (a int, b int, c text)",
        "ALTER TABLE full_row REPLICA IDENTITY FULL",
    ):
        database.session.execute(definition)
    database.create_slots(*PLAIN, *PREPARED)
    for statements in WORKLOAD[:-1]:
        database.run(statements)
    name = f"{database.session.info.dbname}_origin"
    database.session.execute("SELECT pg_replication_origin_create(%s)", [name])
    database.session.execute("SELECT pg_replication_origin_session_setup(%s)", [name])
    database.run(WORKLOAD[-1])
    database.session.execute("SELECT pg_replication_origin_session_reset()")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include-xids": "off"},
        {"include-timestamp": "on"},
        {"skip-empty-xacts": "on"},
        {"only-local": "on"},
        {"stream-changes": "on"},
        {"include-xids": "0", "include-timestamp": "1", "skip-empty-xacts": "1", "only-local": "1"},
    ],
    ids=" ".join,
)
def test_each_option_prints_the_servers_lines(worked: Database, options: Options) -> None:
    assert worked.compare(PLAIN, options) > 10


def test_names_of_types_come_from_type_messages_if_there_is_no_catalog(worked: Database) -> None:
    with PluginDriver(test_decoding.init, server_version=150000) as driver:
        ours = list(read_text_changes(driver, worked.messages("po")))
    assert ours == comparable(worked.theirs("td", {}), [])
    assert (
        """moods[public.mood[]]:'{sad}' pair[public.pair]:'(1,x)' "Moods"["Odd Types"."Mood"[]]:'{Happy}'"""
        in ours[1]
    )


def test_only_include_rewrites_shows_rewrites_which_pgoutput_does_not_send(worked: Database) -> None:
    theirs = comparable(worked.theirs("td", {"include-rewrites": "on"}), [])
    more = list(theirs)
    for line in worked.ours("po", {"include-rewrites": "on"}):
        more.remove(line)
    assert more == ["table public.full_row: INSERT: a[bigint]:2 b[integer]:null c[text]:'y'"]


def test_binary_output_equals_the_text_and_a_text_function_refuses_it(worked: Database) -> None:
    options = {"force-binary": "on"}
    theirs = [bytes(line) for line in worked.peek("td", "pg_logical_slot_peek_binary_changes", options)]
    messages = worked.messages("po")
    version = worked.session.info.server_version
    with PluginDriver(test_decoding.init, list(options.items()), server_version=version) as driver:
        ours = list(read_binary_changes(driver, messages))
    assert [line.decode() for line in ours] == comparable([line.decode() for line in theirs], [])
    with pytest.raises(psycopg.Error, match="produces binary output") as refused:
        worked.theirs("td", options)
    with pytest.raises(OutputTypeError, match="produces binary output") as ours_refused:
        worked.ours("po", options)
    assert ours_refused.value.sqlstate == refused.value.sqlstate


@pytest.mark.parametrize(
    ("option", "value"),
    [("foo", "1"), ("include-xids", "maybe"), ("only-local", ""), ("stream-changes", "2")],
)
def test_options_are_refused_as_by_the_server(worked: Database, option: str, value: str) -> None:
    with pytest.raises(psycopg.Error) as theirs:
        worked.theirs("td", {option: value})
    with pytest.raises(OutputPluginOptionError) as ours:
        worked.ours("po", {option: value})
    assert (ours.value.message, ours.value.sqlstate) == (
        theirs.value.diag.message_primary,
        theirs.value.sqlstate,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"proto_version": "x"},
        {"proto_version": "0"},
        {},
        {"proto_version": "1", "streaming": "on"},
        {"proto_version": "1", "streaming": "maybe"},
        {"proto_version": "2", "two_phase": "on"},
        {"proto_version": "1", "messages": "maybe"},
        {"proto_version": "1", "foo": "on"},
    ],
    ids=str,
)
def test_pgoutput_refuses_options_as_the_server_does(worked: Database, options: Options) -> None:
    named = {"publication_names": "everything"}
    with pytest.raises(psycopg.Error) as theirs:
        worked.peek("po", "pg_logical_slot_peek_binary_changes", options | named)
    with pytest.raises(OutputPluginOptionError) as ours:
        recoded([], options)
    assert (ours.value.message, ours.value.sqlstate) == (
        theirs.value.diag.message_primary,
        theirs.value.sqlstate,
    )


def test_prepared_transactions_print_the_servers_lines(database: Database) -> None:
    database.session.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.create_slots(*PLAIN, *PREPARED)
    gids = [database.session.info.dbname + end for end in ("it's", "\\", "_nodecode")]
    for number, gid in enumerate(gids):
        quoted = sql.Literal(gid).as_string(None)
        for step, end in enumerate(["COMMIT", "ROLLBACK"]):
            database.run([f"INSERT INTO t VALUES ({2 * number + step})"], f"PREPARE TRANSACTION {quoted}")
            database.session.execute(f"{end} PREPARED {quoted}")
    for options in ({}, {"include-timestamp": "on"}, {"skip-empty-xacts": "on", "include-xids": "off"}):
        database.compare(PLAIN, options)
        database.compare(PREPARED, options)
    lines = database.ours("po2", {"include-xids": "off"})
    assert [line.split(" '")[0].split(" E'")[0] for line in lines if "PREPARE" in line] == [
        "PREPARE TRANSACTION",
        "COMMIT PREPARED",
        "PREPARE TRANSACTION",
        "ROLLBACK PREPARED",
    ] * 2


def test_streamed_transactions_alternate_as_on_the_server(database: Database) -> None:
    for table in ("a", "b"):
        database.session.execute(f"CREATE TABLE {table} (id serial PRIMARY KEY, filler text)")
    database.create_slots(*PLAIN, *PREPARED)
    other = database.connect()
    other.execute("BEGIN")
    for _ in range(3):
        other.execute("INSERT INTO b (filler) SELECT repeat('b', 100) FROM generate_series(1, 300)")
        database.run(
            ["INSERT INTO a (filler) SELECT repeat('a', 100) FROM generate_series(1, 300)", "TRUNCATE a"]
        )
    other.execute("COMMIT")
    other.close()
    gid = sql.Literal(database.session.info.dbname).as_string(None)
    large = "INSERT INTO a (filler) SELECT repeat('c', 100) FROM generate_series(1, 600)"
    database.run([large, "SELECT pg_logical_emit_message(true, 'p', 'c')"], f"PREPARE TRANSACTION {gid}")
    database.session.execute(f"COMMIT PREPARED {gid}")
    database.reader.execute("SET logical_decoding_work_mem = '64kB'")
    for options in ({}, {"skip-empty-xacts": "1", "include-xids": "0", "include-timestamp": "1"}):
        for slots in (PLAIN, PREPARED):
            database.compare(slots, options | {"stream-changes": "1"}, streaming="on")
            database.compare(slots, options, streaming="on")
    lines = database.ours("po2", {"stream-changes": "on"}, streaming="on")
    opened = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("opening")]
    assert len([xid for xid, _ in itertools.groupby(opened)]) > len(
        set(opened)
    )  # blocks of two transactions alternate
    assert {line.split(" ")[0] for line in lines} == {
        "opening", "closing", "streaming", "committing", "preparing", "COMMIT",
    }  # fmt: skip
