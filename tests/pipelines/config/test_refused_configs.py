"""What the configuration file refuses: where, why, and with which hint; and no message holds a secret."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import ConfigError, parse_config
from tests.fixtures.configs import (
    FILE,
    LEAST,
    WHOLE,
    outcome,
    read,
    refusal,
    with_published,
    with_source,
    with_subscription,
)

# What is refused: text, line, key, message, hint

OBJECT = "write it as it is on the server, unquoted"
FOLDER = (
    "letters, digits and underscores, no underscore first, 63 at most: "
    "it becomes a folder of the lake and part of an asset key"
)
SUBSCRIPTION_KEYS = "source, publications, row_filter, copy_data, origin, binary, streaming, two_phase, failover, disable_on_error, freshness, types, layout, history"
QUOTED = "is not a name as SQL writes it (double quotes around names with other characters)"
TABLE = 'write it as in SQL: public.orders, "Sales"."Order Lines"'
COLUMN = 'write it as in SQL: region, "Unit Price"'
TYPED = 'write it as in SQL: public.orders.amount, "Sales".lines."Unit Price"'

REFUSED = {
    # keys
    "unknown at the top": (
        LEAST + "suscriptions: {}\n",
        (6, "suscriptions", "unknown key"),
        "did you mean 'subscriptions'? allowed here: lake, storage, spark, catalog, retention, dagster, sources, subscriptions",
    ),
    "unknown in spark": (
        LEAST + "spark:\n  confs: {}\n",
        (7, "spark.confs", "unknown key"),
        "did you mean 'conf'? allowed here: master, conf, engine, engine_idle",
    ),
    "threads without a number": (
        LEAST + "spark: {master: threads}\n",
        (6, "spark.master", "does not say how many threads"),
        "write threads[4], or threads[*] for one a core",
    ),
    "unknown in a source": (
        with_source("slots: x"),
        (3, "sources.shop.slots", "unknown key"),
        "did you mean 'slot'? allowed here: conninfo, password, password_command, standby, allow_untested_server, slot, capture, publications",
    ),
    "unknown in a publication": (
        with_published("{tables: [{table: a.b}], publsh: []}"),
        (3, "sources.shop.publications.emea.publsh", "unknown key"),
        "did you mean 'publish'? allowed here: tables, all_tables, except, sequences, all_sequences, publish, publish_via_partition_root, publish_generated_columns",
    ),
    "unknown in a published table": (
        with_published("{tables: [{table: a.b, wher: x}]}"),
        (3, "sources.shop.publications.emea.tables[0].wher", "unknown key"),
        "did you mean 'where'? allowed here: table, where, columns",
    ),
    "unknown in a subscription": (
        with_subscription("zzz: 1"),
        (5, "subscriptions.sales.zzz", "unknown key"),
        f"allowed here: {SUBSCRIPTION_KEYS}",
    ),
    "a field of the model that is no key": (
        with_source("name: x"),
        (3, "sources.shop.name", "unknown key"),
        "the key above it is its name; allowed here: conninfo, password, password_command, standby, allow_untested_server, slot, capture, publications",
    ),
    "the path": (
        "path: /x\n" + LEAST,
        (1, "path", "unknown key"),
        "allowed here: lake, storage, spark, catalog, retention, dagster, sources, subscriptions",
    ),
    "twice": (LEAST + "lake: x\n", (6, "lake", "is given twice (first on line 1)"), "keep one of them"),
    "twice below": (
        with_source("slot: a, slot: b"),
        (3, "sources.shop.slot", "is given twice (first on line 3)"),
        "keep one of them",
    ),
    "a key that is no text": (LEAST + "? [a]\n: b\n", (6, "", "has a key that is not text"), None),
    # structure
    "missing at the top": (LEAST.replace("lake: ./lake\n", ""), (1, "lake", "is missing"), None),
    "missing in a source": (
        "lake: x\nsources:\n  shop: {}\n",
        (3, "sources.shop.conninfo", "is missing"),
        None,
    ),
    "missing in a subscription": (
        LEAST.replace("source: shop, ", ""),
        (5, "subscriptions.sales.source", "is missing"),
        None,
    ),
    "no sources": ("lake: x\nsources: {}\n", (2, "sources", "should have at least one entry"), None),
    "no publications": (
        LEAST.replace("[p1]", "[]"),
        (5, "subscriptions.sales.publications", "should have at least one entry"),
        None,
    ),
    "no tables": (
        with_published("{tables: []}"),
        (3, "sources.shop.publications.emea.tables", "should have at least one entry"),
        None,
    ),
    "neither tables nor all tables": (
        with_published("{publish: [insert]}"),
        (3, "sources.shop.publications.emea", "has no tables"),
        "list some: `tables: [{table: …}]`, or publish all: `all_tables: true`",
    ),
    "tables and all tables": (
        with_published("{tables: [{table: a.b}], all_tables: true}"),
        (3, "sources.shop.publications.emea", "has `tables` and `all_tables`"),
        "keep one of them",
    ),
    "sequences and all sequences": (
        with_published("{sequences: [a.b], all_sequences: true}"),
        (3, "sources.shop.publications.emea", "has `sequences` and `all_sequences`"),
        "keep one of them",
    ),
    "a sequence twice": (
        with_published("{sequences: [a.b, '\"a\".b']}"),
        (3, "sources.shop.publications.emea.sequences", "names a sequence twice"),
        "keep one of them",
    ),
    "an exception without all tables": (
        with_published("{tables: [{table: a.b}], except: [a.c]}"),
        (3, "sources.shop.publications.emea", "has `except` without `all_tables: true`"),
        "leave the tables out of `tables` instead",
    ),
    "an exception without a schema": (
        with_published("{all_tables: true, except: [secret]}"),
        (3, "sources.shop.publications.emea.except[0]", "has 1 name where 2 are needed"),
        'write it as in SQL: public.orders, "Sales"."Order Lines"',
    ),
    "no columns": (
        with_published("{tables: [{table: a.b, columns: []}]}"),
        (3, "sources.shop.publications.emea.tables[0].columns", "should have at least one entry"),
        None,
    ),
    "text for a list": (
        LEAST.replace("[p1]", "p1"),
        (5, "subscriptions.sales.publications", "should be a list"),
        "in brackets, also a single entry: `[…]`",
    ),
    "text for a set": (
        with_published("{tables: [{table: a.b}], publish: insert}"),
        (3, "sources.shop.publications.emea.publish", "should be a list"),
        "in brackets, also a single entry: `[…]`",
    ),
    "text for a mapping": (
        LEAST.replace("{conninfo: dbname=shop}", "dbname=shop"),
        (3, "sources.shop", "should be a mapping (key: value)"),
        None,
    ),
    "text for a table": (
        with_published("{tables: [public.orders]}"),
        (3, "sources.shop.publications.emea.tables[0]", "should be a mapping (key: value)"),
        None,
    ),
    "a list for a mapping": (
        "lake: x\nsources: [a]\n",
        (2, "sources", "should be a mapping (key: value)"),
        None,
    ),
    "a list for text": (LEAST.replace("./lake", "[a]"), (1, "lake", "should be text"), None),
    "a mapping for a spark setting": (
        LEAST + "spark: {conf: {spark: {driver: 4g}}}\n",
        (6, "spark.conf.spark", "should be text"),
        None,
    ),
    "no value": (
        LEAST.replace(" ./lake", ""),
        (1, "lake", "has no value"),
        "write one, or leave the key out for its default",
    ),
    "null": (
        with_subscription("types: ~"),
        (5, "subscriptions.sales.types", "has no value"),
        "write one, or leave the key out for its default",
    ),
    "a tag": (
        LEAST.replace("./lake", "!!python/name:os.system x"),
        (1, "lake", "has a YAML tag"),
        "leave the tag (!name) out: the key says what it is",
    ),
    "a cycle": (
        LEAST + "spark: &s {conf: *s}\n",
        (6, "spark.conf", "is an alias of something that contains it"),
        None,
    ),
    "a NUL": (
        LEAST.replace("./lake", '"a\\0b"'),
        (1, "lake", "has a character that is no text (NUL, or not valid Unicode)"),
        None,
    ),
    "a lone surrogate": (
        LEAST.replace("./lake", '"\\uD800"'),
        (1, "lake", "has a character that is no text (NUL, or not valid Unicode)"),
        None,
    ),
    # values
    "freshness": (
        with_subscription("freshness: 30 seconds"),
        (5, "subscriptions.sales.freshness", "is not a time to wait for"),
        "a number of minutes, hours, days or weeks, as in `15 minutes`",
    ),
    "row_filter": (
        with_subscription("row_filter: publsher"),
        (5, "subscriptions.sales.row_filter", "should be one of pipeline, publisher"),
        "did you mean 'publisher'? allowed here: pipeline, publisher",
    ),
    "streaming": (
        with_subscription("streaming: of"),
        (5, "subscriptions.sales.streaming", "should be one of off, on, parallel"),
        "did you mean 'off'? allowed here: off, on, parallel",
    ),
    "origin": (
        with_subscription("origin: local"),
        (5, "subscriptions.sales.origin", "should be one of any, none"),
        "allowed here: any, none",
    ),
    "an operation": (
        with_published("{tables: [{table: a.b}], publish: [insert, updates]}"),
        (3, "sources.shop.publications.emea.publish[1]", "should be one of insert, update, delete, truncate"),
        "did you mean 'update'? allowed here: insert, update, delete, truncate",
    ),
    "a boolean": (
        with_subscription("two_phase: maybe"),
        (5, "subscriptions.sales.two_phase", "should be true or false"),
        None,
    ),
    "an empty lake": (
        LEAST.replace("./lake", "''"),
        (1, "lake", "is empty"),
        "leave the key out for its default",
    ),
    "an empty filter": (
        with_published("{tables: [{table: a.b, where: ' '}]}"),
        (3, "sources.shop.publications.emea.tables[0].where", "is empty"),
        "leave the key out for its default",
    ),
    "an empty type": (
        with_subscription("types: {a.b.c: ''}"),
        (5, "subscriptions.sales.types[a.b.c]".replace("[a.b.c]", '."a.b.c"'), "is empty"),
        "leave the key out for its default",
    ),
    "a slot": (
        with_source("slot: Shop-1"),
        (3, "sources.shop.slot", "is not a name for a replication slot"),
        "a-z, 0-9 and _, 63 at most",
    ),
    "a long slot": (
        with_source(f"slot: {'s' * 64}"),
        (3, "sources.shop.slot", "is not a name for a replication slot"),
        "a-z, 0-9 and _, 63 at most",
    ),
    "a slot that ends in a line break": (
        with_source('slot: "shop\\n"'),
        (3, "sources.shop.slot", "is not a name for a replication slot"),
        "a-z, 0-9 and _, 63 at most",
    ),
    "a long capture": (
        with_source(f"capture: {'ü' * 32}"),
        (3, "sources.shop.capture", "should be a name of 1 to 54 bytes"),
        OBJECT,
    ),
    "an empty publication name": (
        LEAST.replace("[p1]", "[p1, '']"),
        (5, "subscriptions.sales.publications[1]", "should be a name of 1 to 63 bytes"),
        OBJECT,
    ),
    "a publication twice": (
        LEAST.replace("[p1]", "[p1, p2, p1]"),
        (5, "subscriptions.sales.publications", "names a publication twice"),
        "keep one of them",
    ),
    "a table without schema": (
        with_published("{tables: [{table: orders}]}"),
        (3, "sources.shop.publications.emea.tables[0].table", "has 1 name where 2 are needed"),
        TABLE,
    ),
    "a table with a database": (
        with_published("{tables: [{table: shop.public.orders}]}"),
        (3, "sources.shop.publications.emea.tables[0].table", "has 3 names where 2 are needed"),
        TABLE,
    ),
    "a table with a space": (
        with_published("{tables: [{table: public.order lines}]}"),
        (3, "sources.shop.publications.emea.tables[0].table", QUOTED),
        TABLE,
    ),
    "a table twice": (
        with_published("{tables: [{table: a.B}, {table: A.b}]}"),
        (3, "sources.shop.publications.emea.tables", "names a table twice"),
        "keep one of them",
    ),
    "a column": (
        with_published("{tables: [{table: a.b, columns: [1st]}]}"),
        (3, "sources.shop.publications.emea.tables[0].columns", QUOTED),
        COLUMN,
    ),
    "a column twice": (
        with_published("{tables: [{table: a.b, columns: [id, ID]}]}"),
        (3, "sources.shop.publications.emea.tables[0].columns", "names a column twice"),
        "keep one of them",
    ),
    "a typed column without its table": (
        with_subscription("types: {orders.amount: string}"),
        (5, 'subscriptions.sales.types."orders.amount"', "has 2 names where 3 are needed"),
        TYPED,
    ),
    "a typed column twice": (
        with_subscription("types: {a.b.c: string, a.B.c: string}"),
        (5, "subscriptions.sales.types", "names a column twice"),
        "keep one of them",
    ),
    "a conninfo": (
        LEAST.replace("dbname=shop", "shop"),
        (3, "sources.shop.conninfo", "is not a connection string that libpq can read"),
        (
            "keyword=value pairs, values with spaces in single quotes; or postgresql://user@host/dbname, "
            "with %-codes for special characters; a password with such characters goes into a `password` of its own"
        ),
    ),
    "an empty password": (
        LEAST.replace("conninfo: ", "password: '', conninfo: "),
        (3, "sources.shop.password", "is empty"),
        "leave the key out for none, or for that of PGPASSWORD or .pgpass",
    ),
    "a password command for a shell": (
        LEAST.replace("conninfo: ", "password_command: echo secret, conninfo: "),
        (3, "sources.shop.password_command", "should be a list"),
        "in brackets, also a single entry: `[…]`",
    ),
    "a password command without a program": (
        LEAST.replace("conninfo: ", "password_command: [''], conninfo: "),
        (3, "sources.shop.password_command", "names no program"),
        "a list: the program, then its arguments one by one; no shell reads them",
    ),
    "two passwords": (
        LEAST.replace("conninfo: ", "password: a, password_command: [b], conninfo: "),
        (3, "sources.shop", "has a `password` and a `password_command`"),
        "keep one of them",
    ),
    # names and references
    "a source with an underscore first": (
        LEAST.replace("shop", "_shop"),
        (3, "sources._shop", "cannot be a name"),
        FOLDER,
    ),
    "a source with a hyphen": (
        LEAST.replace("shop", "my-shop"),
        (3, "sources.my-shop", "cannot be a name"),
        FOLDER,
    ),
    "a subscription with a slash": (
        LEAST.replace("sales", "a/b"),
        (5, 'subscriptions."a/b"', "cannot be a name"),
        FOLDER,
    ),
    "a subscription that ends in a line break": (
        LEAST.replace("sales", '"sales\\n"'),
        (5, 'subscriptions."sales\\n"', "cannot be a name"),
        FOLDER,
    ),
    "a long subscription": (
        LEAST.replace("sales", "s" * 64),
        (5, f"subscriptions.{'s' * 64}", "cannot be a name"),
        FOLDER,
    ),
    "a freshness in a unit that there is not": (
        with_subscription("freshness: 3 fortnights"),
        (5, "subscriptions.sales.freshness", "is not a time to wait for"),
        "a number of minutes, hours, days or weeks, as in `15 minutes`",
    ),
    "an unknown source": (
        LEAST.replace("source: shop", "source: shops"),
        (5, "subscriptions.sales.source", "is not a source of this file"),
        "did you mean 'shop'? allowed here: shop",
    ),
    "two subscriptions that differ in case": (
        LEAST + "  Sales: {source: shop, publications: [p1]}\n",
        (6, "subscriptions.Sales", "differs from sales only in case"),
        "give one of them another name",
    ),
    "two sources on one slot": (
        LEAST.replace("subscriptions", "  b: {conninfo: dbname=shop, slot: pgsieve_shop}\nsubscriptions"),
        (4, "sources.b.slot", "is the slot of source shop too"),
        "one slot is read once: give one of them another slot",
    ),
    "a publication of this file for the publisher": (
        LEAST.replace("dbname=shop", "dbname=shop, publications: {p1: {tables: [{table: a.b}]}}").replace(
            "[p1]", "[p0, p1], row_filter: publisher"
        ),
        (
            5,
            "subscriptions.sales.publications[1]",
            "is defined in this file, so the publisher cannot filter by it",
        ),
        "use row_filter: pipeline, or create the publication on the server",
    ),
    "a slot of a subscription that the source has": (
        with_source("slot: pgsieve_shop_sales").replace("[p1]", "[p1], row_filter: publisher"),
        (5, "subscriptions.sales", "needs the slot and folder pgsieve_shop_sales, which source shop has"),
        "give one of them another name",
    ),
    "two subscriptions whose slots meet": (
        (
            "lake: x\n"
            "sources: {a: {conninfo: host=x}, a_b: {conninfo: host=y}}\n"
            "subscriptions:\n"
            "  b_c: {source: a, publications: [p], row_filter: publisher}\n"
            "  c: {source: a_b, publications: [p], row_filter: publisher}\n"
        ),
        (5, "subscriptions.c", "needs the slot and folder pgsieve_a_b_c, which subscription b_c has"),
        "give one of them another name",
    ),
    # the environment
    "a variable that is not set": (
        LEAST.replace("dbname=shop", "'dbname=${SHOP_DB}'"),
        (3, "sources.shop.conninfo", "environment variable SHOP_DB is not set"),
        "set SHOP_DB, or $${ for a literal ${",
    ),
    "no variable's name": (
        LEAST.replace("./lake", "'a${1}'"),
        (1, "lake", "has a '${' that no variable's name and '}' follow"),
        "write ${NAME} for an environment variable, $${ for the two characters themselves",
    ),
    # YAML
    "nothing": ("# only a comment\n", (None, "", "is empty"), "begin with `lake: ./lake`"),
    "a list": ("- a\n", (1, "", "should be a mapping (key: value)"), "begin with `lake: ./lake`"),
    "two documents": (
        LEAST + "---\na: b\n",
        (6, "", "more than one YAML document"),
        "keep one, without a line of ---",
    ),
    "an alias without anchor": (
        LEAST.replace("./lake", "*lake"),
        (1, "", "a value begins with * but no anchor (&) of that name exists"),
        "put it in quotes",
    ),
    "a control character": (
        "lake: \x01",
        (None, "", "a character that YAML does not allow (a control character?)"),
        None,
    ),
    "an escape out of range": (
        'lake: "\\UFFFFFFFF"',
        (None, "", "not valid YAML: an escape or number out of range"),
        None,
    ),
    "a deep nest": ("lake: " + "[" * 5000, (None, "", "not valid YAML: nested too deeply"), None),
    "an open bracket": (
        "lake: [a",
        (1, "", "not valid YAML: expected ',' or ']', but got '<stream end>'"),
        "a value with : # { [ * ! or % needs quotes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_where_and_why(case):
    text, (line, key, message), hint = REFUSED[case]
    error = refusal(text)
    assert [(each.line, each.key, each.message) for each in error.problems] == [(line, key, message)]
    assert (error.line, error.key, error.hint) == (line, key, hint)
    place = f"{FILE}:{line}" if line else str(FILE)
    assert error.message == ": ".join(part for part in (place, key, message) if part)
    assert error.file == FILE
    assert isinstance(error, PgsieveError)


def test_the_allowed_names_can_be_read_by_a_program():
    assert refusal(LEAST + "x: 1\n").allowed == (
        "lake",
        "storage",
        "spark",
        "catalog",
        "retention",
        "dagster",
        "sources",
        "subscriptions",
    )
    assert refusal(with_subscription("origin: x")).allowed == ("any", "none")


def test_every_problem_is_told_in_the_order_of_the_file():
    error = refusal(
        "lakes: x\nsources:\n  shop: {conninfo: dbname=x, slot: A}\nsubscriptions: {s: {source: shop}}\n"
    )
    assert [(each.line, each.key) for each in error.problems] == [
        (1, "lake"),
        (1, "lakes"),
        (3, "sources.shop.slot"),
        (4, "subscriptions.s.publications"),
    ]
    assert str(error).splitlines() == [
        f"{FILE}:1: lake: is missing",
        f"{FILE}:1: lakes: unknown key (did you mean 'lake'? allowed here: lake, storage, spark, catalog, retention, dagster, sources, subscriptions)",
        f"{FILE}:3: sources.shop.slot: is not a name for a replication slot (a-z, 0-9 and _, 63 at most)",
        f"{FILE}:4: subscriptions.s.publications: is missing",
    ]


def test_the_same_slot_on_two_servers_is_two_slots():
    text = LEAST.replace("subscriptions", "  b: {conninfo: host=other, slot: pgsieve_shop}\nsubscriptions")
    assert read(text).sources["b"].slot == read(text).sources["shop"].slot


def _values(node: yaml.Node) -> Iterator[tuple[int, int]]:
    """Where each value of the documented file begins and ends."""
    if isinstance(node, yaml.ScalarNode):
        yield node.start_mark.index, node.end_mark.index
    for child in node.value if not isinstance(node, yaml.ScalarNode) else ():
        yield from _values(child[1] if isinstance(child, tuple) else child)


@pytest.mark.parametrize(("begin", "end"), _values(yaml.compose(WHOLE)))
def test_no_message_and_no_traceback_holds_a_value_of_the_environment(begin, end):
    """A secret at the place of any value, in a form that most places refuse."""
    secret = "s3cr3t = 'x"
    result = outcome(f"{WHOLE[:begin]}'${{PW}}'{WHOLE[end:]}", PW=secret)
    if isinstance(result, ConfigError):
        shown = "".join(traceback.format_exception(result))
        assert "s3cr3t" not in shown + repr(result) + repr(result.problems)
    else:
        assert "s3cr3t" not in repr(result.sources["shop"].conninfo)
        # A place where any text may stand; of Spark's settings no repr shows one.
        assert "s3cr3t" in f"{result!r} {result.spark.conf}"


@pytest.mark.parametrize(
    "password", ["pw0 pw1", "pw0'pw1", "pw0 pw1=pw2", "*pw0", "%pw0", "[pw0", "pw0: pw1"]
)
def test_no_message_holds_a_piece_of_a_password_written_in_the_file(password):
    for conninfo in (
        f"host=db password={password}",
        f'"host=db password={password}"',
        f"postgres://u:{password}@h/d",
    ):
        for text in (
            LEAST.replace("dbname=shop", conninfo),
            LEAST.replace("{conninfo: dbname=shop}", conninfo),
        ):
            assert "pw" not in str(outcome(text))


def test_a_source_that_is_missing_is_told_beside_what_else_is_wrong(tmp_path):
    text = LEAST.replace("source: shop", "source: shops, row_filter: publsher")
    with pytest.raises(ConfigError) as raised:
        parse_config(text, tmp_path / "pgsieve.yaml")
    assert [(p.key, p.message) for p in raised.value.problems] == [
        ("subscriptions.sales.row_filter", "should be one of pipeline, publisher"),
        ("subscriptions.sales.source", "is not a source of this file"),
    ]


# Whatever stands in the file

YAMLISH = st.text(alphabet="ab:,-?[]{}'\"#&*!|>%@`\\ \t\n\r${}~<=.0x_U\x00\ud800\u2028é", max_size=60)


@st.composite
def spoiled(draw: st.DrawFn) -> str:
    """Spoil the documented file at one place."""
    at = draw(st.integers(0, len(WHOLE)))
    cut = draw(st.integers(0, 30))
    return WHOLE[:at] + draw(st.one_of(YAMLISH, st.text(max_size=10))) + WHOLE[at + cut :]


@given(st.one_of(st.text(), YAMLISH, YAMLISH.map("lake: ".__add__), spoiled()))
@example("%YAML 1." + "1" * 5000 + "\n---\na: b")
@example("a: &a [*a]")
@example("&a {*a : b}")
@example("? {a: b}\n: c")
@example("a: !!binary x")
@example("!!set {a, b}")
@example("sources: &s {a: {publications: *s}}")
@example("<<: {lake: x}")
@settings(max_examples=int(os.environ.get("PGSIEVE_EXAMPLES", "400")), deadline=None)
def test_any_text_is_a_config_or_a_config_error(text):
    result = outcome(text, A="x")
    if isinstance(result, ConfigError):
        str(result).encode()  # what is printed can be printed
        assert result.problems
    else:
        assert result.sources
