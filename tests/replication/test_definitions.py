"""Which publications CREATE PUBLICATION accepts, and which changes the publisher then refuses (sections 29.4.2, 29.5 and 29.6).

The server is the oracle. pgsieve refuses a publication of pgsieve.yaml exactly if the server does, in the same words and with the
same SQLSTATE. For each existing publication, of the server or of the file, pgsieve knows which UPDATEs and DELETEs the publisher
refuses. No test needs a JVM: all of this is checked before any row is read.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.validation.examination import Examination
from pgsieve.assets.steps.validation.waiting import find_table_problems, select_sound_subscriptions
from pgsieve.decoding.errors import PgsieveError, UnsupportedFilterError
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog, PublicationError
from pgsieve.decoding.publications.definition import DefinedPublication, DefinedTable
from pgsieve.decoding.publications.filters import parse_table_filter
from pgsieve.decoding.publications.generated_columns import expand_unsent_columns
from pgsieve.decoding.publications.published_tables import find_published_relation
from pgsieve.decoding.publications.replica_identity import find_publisher_errors
from pgsieve.decoding.publications.routing import list_relations_with_rows
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.filter_analysis import UncheckedFilterError
from pgsieve.resources.postgres.source import Source, quote
from tests.fixtures.tries import budget_seconds, drawing, drawn_seed

pytestmark = pytest.mark.slow

#: Every replica identity, plain and generated; partitions whose columns, identities and depths differ; inheritance.
TABLES = """
CREATE TABLE plain (a int PRIMARY KEY, b int, c text);
CREATE TABLE two (a int, b int, c text, PRIMARY KEY (b, a));
CREATE TABLE keyless (a int, b int, c text);
CREATE TABLE whole (a int PRIMARY KEY, b int, c text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE nothing (a int PRIMARY KEY, b int, c text);
ALTER TABLE nothing REPLICA IDENTITY NOTHING;
CREATE TABLE indexed (a int PRIMARY KEY, b int NOT NULL, c text);
CREATE UNIQUE INDEX indexed_b ON indexed (b) INCLUDE (c);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_b;
CREATE TABLE later (a int PRIMARY KEY DEFERRABLE, b int, c text);
CREATE TABLE stored (a int, b int GENERATED ALWAYS AS (a * 2) STORED, c text, PRIMARY KEY (a, b));
CREATE TABLE beside (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED, c text);
CREATE TABLE storedwhole (a int, b int GENERATED ALWAYS AS (a * 2) STORED, c text);
ALTER TABLE storedwhole REPLICA IDENTITY FULL;
CREATE TABLE parent (a int PRIMARY KEY, b int, c text);
CREATE TABLE child (d int) INHERITS (parent);
CREATE TABLE grandchild (PRIMARY KEY (a)) INHERITS (child);
CREATE TABLE root (a int, b int NOT NULL, c text, PRIMARY KEY (a)) PARTITION BY RANGE (a);
CREATE TABLE leaf (b int NOT NULL, gone int, c text, a int NOT NULL);
ALTER TABLE leaf DROP COLUMN gone;
ALTER TABLE root ATTACH PARTITION leaf FOR VALUES FROM (0) TO (10);
CREATE UNIQUE INDEX leaf_b ON leaf (b);
ALTER TABLE leaf REPLICA IDENTITY USING INDEX leaf_b;
CREATE TABLE middle PARTITION OF root FOR VALUES FROM (10) TO (20) PARTITION BY LIST (a);
CREATE TABLE deep PARTITION OF middle DEFAULT;
ALTER TABLE deep REPLICA IDENTITY FULL;
CREATE TABLE rest PARTITION OF root DEFAULT;
CREATE SCHEMA "odd ""s";
CREATE TABLE "odd ""s"."odd ""t" (a int PRIMARY KEY, "b" int, "c" text, "odd ""c" int);
"""
VIRTUAL = """
CREATE TABLE virtual (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) VIRTUAL, c text,
    d text GENERATED ALWAYS AS (c || 'x') VIRTUAL);
CREATE TABLE virtualwhole (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) VIRTUAL, c text);
ALTER TABLE virtualwhole REPLICA IDENTITY FULL;
"""
UNPUBLISHABLE = """
CREATE VIEW a_view AS SELECT 1 AS a;
CREATE MATERIALIZED VIEW a_materialized_view AS SELECT 1 AS a;
CREATE SEQUENCE a_sequence;
CREATE UNLOGGED TABLE an_unlogged_table (a int);
CREATE FOREIGN DATA WRAPPER w;
CREATE SERVER s FOREIGN DATA WRAPPER w;
CREATE FOREIGN TABLE a_foreign_table (a int) SERVER s;
"""

ALL = frozenset(OPERATIONS)
GENERATED = {"n": "none", "s": "stored"}
FILTERS = (
    "a > 1", "b > 1", "c = 'x'", "a > 1 AND b > 1", "(a, b) < (1, 2)", "true", "d = 'x'", "random() < 0.5", "b", "e > 1",
)  # fmt: skip
LISTS = (
    ("a",), ("b",), ("a", "b"), ("c", "a"), ("a", "b", "c"), ("a", "a"), ("a", "ctid"), ("a", "nowhere"),
    ("a", "d"), ("a", 'odd "c'),
)  # fmt: skip


@dataclass(frozen=True)
class Database:
    """A publisher with one table for each case."""

    connection: psycopg.Connection
    conninfo: str
    version: int

    def examined(self, defined: DefinedPublication) -> Examination:
        """pgsieve's examination of a publication of pgsieve.yaml."""
        return Examination(self.connection, self.slot_stream(defined), read_catalog(self.connection))

    def slot_stream(self, defined: DefinedPublication) -> SlotStream:
        own = {defined.name: defined}
        names = {"s": (defined.name,)}
        return SlotStream("shop", Source("shop", self.conninfo), "slot", "capture", False, names, own)

    def first_refusal(self, defined: DefinedPublication) -> tuple[str | None, str] | None:
        refused = self.examined(defined).definition_problems
        if not refused:
            return None
        return refused[0].sqlstate, refused[0].message.removeprefix(f'publication "{defined.name}": ')

    @contextmanager
    def created(self, defined: DefinedPublication) -> Iterator[tuple[str | None, str] | None]:
        """Create the same publication on the server for the block. Yields the error of CREATE PUBLICATION, or None."""
        try:
            self.connection.execute(statement(defined, self.version))
        except psycopg.Error as error:
            yield refusal_of(error)
            return
        yield None
        self.connection.execute(f"DROP PUBLICATION {quote(defined.name)}")

    def refused_by_the_server(self) -> dict[tuple[str, str], tuple[str | None, str]]:
        """By table and operation, the publisher's errors for an UPDATE and a DELETE of each table."""
        refused = {}
        for schema, name in [
            (t.schema, t.name) for t in list_relations_with_rows(read_catalog(self.connection))
        ]:
            for operation, change in (("update", "UPDATE {} SET c = c"), ("delete", "DELETE FROM {}")):
                try:
                    self.connection.execute(change.format("ONLY " + quote(schema, name)) + " WHERE false")
                except psycopg.Error as error:
                    refused[name, operation] = refusal_of(error)
        return refused


def refusal_of(error: psycopg.Error) -> tuple[str | None, str]:
    detail = error.diag.message_detail
    return error.sqlstate, f"{error.diag.message_primary}: {detail}" if detail else str(
        error.diag.message_primary
    )


def refused_by_pgsieve(catalog: Catalog, name: str) -> dict[tuple[str, str], tuple[str | None, str]]:
    """The same errors as pgsieve predicts them, for one publication of the catalog."""
    refused = {}
    for table in list_relations_with_rows(catalog):
        for error in find_publisher_errors(table, catalog.publications[name], catalog):
            operation = "update" if error.message.startswith("cannot update") else "delete"
            message = error.message.split(" (publication")[0].replace(table.qualified_name, table.name)
            refused[table.name, operation] = (error.sqlstate, message)
    return refused


def statement(defined: DefinedPublication, version: int) -> str:
    """The CREATE PUBLICATION statement for a publication of pgsieve.yaml."""
    tables = []
    for table in defined.tables:
        columns = f" ({', '.join(map(quote, table.columns))})" if table.columns is not None else ""
        where = f" WHERE ({table.where})" if table.where is not None else ""
        tables.append(quote(table.schema, table.name) + columns + where)
    options = f"publish = '{', '.join(defined.operations)}', publish_via_partition_root = {defined.via_root}"
    if version >= 180000:
        options += f", publish_generated_columns = {GENERATED[defined.generated_columns]}"
    objects = f"TABLE {', '.join(tables)}"
    if defined.all_tables:
        excluded = ", ".join(quote(*name) for name in defined.excluded)
        objects = "ALL TABLES" + (f" EXCEPT (TABLE {excluded})" if excluded else "")
    return f"CREATE PUBLICATION {quote(defined.name)} FOR {objects} WITH ({options})"


@pytest.fixture(scope="module", params=["publisher_server", "decoding_server", "publisher_19"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    server: EmbeddedServer = request.getfixturevalue(request.param)
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE definitions")
        conninfo = server.conninfo(dbname="definitions")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            version = connection.info.server_version
            connection.execute(TABLES + UNPUBLISHABLE + (VIRTUAL if version >= 180000 else ""))
            yield Database(connection, conninfo, version)
        admin.execute("DROP DATABASE definitions WITH (FORCE)")


def own(*tables: DefinedTable, **parameters: object) -> DefinedPublication:
    arguments = {"operations": ALL, "via_root": False, **parameters}
    return DefinedPublication("own", tables, **arguments)  # type: ignore[arg-type]


def random_publication(r: random.Random, catalog: Catalog) -> DefinedPublication:
    tables = list(catalog.tables.values())
    chosen = [
        DefinedTable(
            table.schema,
            table.name,
            r.choice(FILTERS) if r.random() < 0.4 else None,
            r.choice(LISTS) if r.random() < 0.4 else None,
        )
        for table in r.choices(tables, k=r.choice((1, 1, 1, 2, 3)))
    ]
    generated = r.choice("ns") if catalog.server_version >= 180000 else "n"
    operations = r.choice((ALL, {"insert"}, {"update"}, {"delete", "insert"}, {"truncate"}))
    parameters = {
        "operations": frozenset(operations),
        "via_root": r.random() < 0.5,
        "generated_columns": generated,
    }
    if r.random() < 0.2:
        excluded = r.choices(tables, k=r.choice((0, 1, 2))) if catalog.server_version >= 190000 else []
        names = tuple((table.schema, table.name) for table in excluded)
        return own(all_tables=True, excluded=names, **parameters)
    return own(*chosen, **parameters)


def agree(database: Database, defined: DefinedPublication) -> tuple[str | None, ...]:
    """Assert that pgsieve and the server give the same answers about a publication. Return their SQLSTATEs."""
    examined = database.first_refusal(defined)
    with database.created(defined) as server_says:
        assert examined == server_says
        if server_says is not None:
            return (server_says[0],)
        refused = database.refused_by_the_server()
        assert refused_by_pgsieve(read_catalog(database.connection), "own") == refused
    assert refused_by_pgsieve(database.examined(defined).catalog, "own") == refused
    return tuple(sorted({str(sqlstate) for sqlstate, _ in refused.values()}))


def test_random_publications_are_refused_where_the_server_refuses_them(database: Database) -> None:
    seed = drawn_seed()
    r = random.Random(seed)
    catalog = read_catalog(database.connection)
    verdicts: Counter[tuple[str | None, ...]] = Counter()
    for _ in drawing(budget_seconds(5), lambda: verdicts.total() >= 20 and len(verdicts) > 3):
        defined = random_publication(r, catalog)
        try:
            verdicts[agree(database, defined)] += 1
        except AssertionError as error:
            error.add_note(f"{statement(defined, database.version)} (PGSIEVE_SEED={seed})")
            raise
    print(f"drawn: seed {seed}, {verdicts.total()} publications, {len(verdicts)} verdicts")
    assert len(verdicts) > 3


def test_a_change_that_the_identity_does_not_cover_is_refused(database: Database) -> None:
    tables = [t for t in list_relations_with_rows(read_catalog(database.connection)) if t.schema == "public"]
    wheres, lists = (None, "a > 1", "b > 1"), (None, ("a",), ("a", "b"))
    counts: Counter[tuple[str | None, ...]] = Counter()
    for where, columns in itertools.product(wheres, lists):
        each = (DefinedTable("public", t.name, where, columns) for t in tables if not t.children)
        defined = own(*(t for t in each if t.name != "grandchild"), via_root=True)
        counts[agree(database, defined)] += 1
    assert ("42P10", "55000") in counts


@pytest.mark.parametrize(
    "relation",
    [
        "a_view",
        "a_materialized_view",
        "a_sequence",
        "an_unlogged_table",
        "a_foreign_table",
        "nowhere",
        "leaf_b",
    ],
)
def test_only_permanent_tables_can_be_published(database: Database, relation: str) -> None:
    defined = own(DefinedTable("public", relation))
    refusal = database.first_refusal(defined)
    with database.created(defined) as server_says:
        assert server_says is not None
    if relation == "leaf_b" and database.version < 160000:
        refusal, server_says = (
            refusal and (refusal[0], ""),
            (server_says[0], ""),
        )  # other words before version 16
    assert refusal == server_says
    if database.version >= 190000:
        agree(database, own(all_tables=True, excluded=(("public", relation),)))


@pytest.mark.parametrize(("schema", "name"), [("pg_catalog", "pg_class"), ("nowhere", "t")])
def test_system_tables_and_missing_schemas_are_named(database: Database, schema: str, name: str) -> None:
    defined = own(DefinedTable(schema, name))
    with database.created(defined) as server_says:
        assert database.first_refusal(defined) == server_says is not None


def test_a_table_that_is_listed_twice_must_have_neither_filter_nor_list(database: Database) -> None:
    entries = (DefinedTable("public", "plain"), DefinedTable("public", "plain", "a > 1"))
    entries += (replace(entries[0], columns=("a",)), replace(entries[1], columns=("a",)))
    for tables in itertools.product(entries, repeat=2):
        agree(database, own(*tables))


def test_a_table_is_published_with_its_inheritance_children(database: Database) -> None:
    defined = own(DefinedTable("public", "parent", "a > 1", ("a",)))
    assert agree(database, defined) == ("42P10",)
    entries = database.examined(defined).catalog.publications["own"].tables
    tables = read_catalog(database.connection).tables
    assert [tables[entry.oid].name for entry in entries] == ["parent", "child", "grandchild"]


def test_publications_must_agree_on_generated_columns(database: Database) -> None:
    if database.version < 180000:
        refused = database.first_refusal(own(DefinedTable("public", "plain"), generated_columns="s"))
        assert refused == ("42601", 'unrecognized publication parameter: "publish_generated_columns"')
        return
    for table, agrees in (("plain", True), ("beside", False), ("virtual", False)):
        tables = (DefinedTable("public", table),)
        both = [replace(own(*tables, generated_columns=g), name=g) for g in "ns"]
        with database.created(both[0]), database.created(both[1]):
            catalog = read_catalog(database.connection)
            streamed = stream(database, f"INSERT INTO {table} VALUES (1)", "n,s")
            assert combined(catalog, table) == streamed
            assert (streamed is None) == agrees


def combined(catalog: Catalog, table: str) -> tuple[str | None, str] | None:
    """pgsieve's error for the publications n and s together."""
    try:
        find_published_relation(
            catalog.table_by_name["public", table], catalog.select_publications("ns"), catalog
        )
    except PublicationError as error:
        return error.sqlstate, error.message.split(" (")[0]
    return None


def stream(database: Database, change: str, publications: str) -> tuple[str | None, str] | None:
    """pgoutput's error for a change."""
    connection = database.connection
    connection.execute("SELECT pg_create_logical_replication_slot('generated', 'pgoutput')")
    try:
        connection.execute(change)
        connection.execute(
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('generated', NULL, NULL, 'proto_version', '1',"
            " 'publication_names', %s)",
            [publications],
        )
    except psycopg.Error as error:
        return refusal_of(error)
    finally:
        connection.execute("SELECT pg_drop_replication_slot('generated')")
    return None


def test_a_virtual_generated_column_in_a_filter_stands_for_its_expression(database: Database) -> None:
    """The server expands the column when it stores the filter. A filter in pgsieve.yaml means the same."""
    if database.version < 180000:  # there are none
        assert '"' not in expand_unsent_columns(
            "b > 1", read_catalog(database.connection).table_by_name["public", "plain"]
        )
        return
    wheres = (
        "b > 10",
        "B / 4 = 1 AND a > 1",
        "virtual.b IN (2, 4)",
        "c = 'b' OR \"b\" IS NULL",
        "b BETWEEN 2 AND 4",
    )
    for where in wheres:
        defined = own(DefinedTable("public", "virtual", where))
        with database.created(defined):
            catalog = read_catalog(database.connection)
            (entry,) = catalog.publications["own"].tables
            table = catalog.tables[entry.oid]
            assert entry.where is not None
            assert parse_table_filter(table, where).tree == parse_table_filter(table, entry.where).tree


def test_a_filter_on_a_generated_column_that_old_rows_lack_is_refused(database: Database) -> None:
    """The replica identity has a stored generated column. Servers before 18 do not send it, nor the column that it is computed from."""
    database.connection.execute(
        "CREATE TABLE made (a int, b int GENERATED ALWAYS AS (a * 2) STORED PRIMARY KEY, c text);"
        "CREATE PUBLICATION there FOR TABLE made WHERE (b > 1) WITH (publish = 'update'"
        + (", publish_generated_columns = stored)" if database.version >= 180000 else ")")
    )
    try:
        server = read_catalog(database.connection)
        slot_stream = replace(
            database.slot_stream(own(DefinedTable("public", "plain"))), subscriptions={"s": ("there",)}
        )
        problems = find_table_problems(Subscription("s", slot_stream), server)
        assert select_sound_subscriptions(database.connection, slot_stream, server)[0] == slot_stream
        if database.version >= 180000:
            assert not problems
        else:
            assert isinstance(problems["public", "made"], UnsupportedFilterError)
            assert "from which it is computed (a)" in str(problems["public", "made"])
    finally:
        database.connection.execute("DROP PUBLICATION IF EXISTS there; DROP TABLE IF EXISTS made")


def test_publications_of_the_server_and_of_the_file_are_one_list(database: Database) -> None:
    on_server = replace(own(DefinedTable("public", "plain", columns=("a", "b"))), name="there")
    defined = own(DefinedTable("public", "plain", columns=("a", "c")))
    with database.created(on_server):
        slot_stream = replace(database.slot_stream(defined), subscriptions={"s": ("there", "own")})
        with pytest.raises(PublicationError, match="cannot use different column lists for table") as raised:
            select_sound_subscriptions(database.connection, slot_stream, read_catalog(database.connection))
    assert raised.value.sqlstate == "0A000"


def test_a_filter_that_the_publisher_cannot_check_is_reported_and_the_run_goes_on(database: Database) -> None:
    database.connection.execute("CREATE ROLE limited LOGIN")
    database.connection.execute("REVOKE TEMPORARY ON DATABASE definitions FROM PUBLIC")
    try:
        with psycopg.connect(make_conninfo(database.conninfo, user="limited"), autocommit=True) as connection:
            limited = replace(database, connection=connection)
            sound, unsound = (own(DefinedTable("public", "plain", where)) for where in ("a > 1", "b > 1"))
            examined = limited.examined(sound)
            assert isinstance(examined.check_failure, UncheckedFilterError)
            assert "temporary" in str(examined.check_failure)
            assert not examined.definition_problems
            server = read_catalog(connection)
            assert (
                "own"
                in select_sound_subscriptions(connection, limited.slot_stream(sound), server)[1].publications
            )
            with pytest.raises(PgsieveError, match="not part of the replica identity"):
                select_sound_subscriptions(connection, limited.slot_stream(unsound), server)
    finally:
        database.connection.execute("GRANT TEMPORARY ON DATABASE definitions TO PUBLIC")
        database.connection.execute("DROP ROLE limited")


def test_the_server_decides_on_letter_case_in_a_filter_of_the_file(database: Database) -> None:
    def problems(where: str) -> list[str]:
        defined = replace(own(DefinedTable("public", "plain", where)), operations=frozenset(("insert",)))
        return [problem.message for problem in database.examined(defined).find_problems("s")]

    assert not problems("lower(c) = 'x' OR c ILIKE 'y%' OR c ~* '^z'")
    (refused,) = problems(
        "upper(c COLLATE unicode) = 'X'"
        if database.version >= 160000
        else "upper(c COLLATE \"de-x-icu\") = 'X'"
    )
    assert "ICU's, which depends on languages and contexts" in refused
