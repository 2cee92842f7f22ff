"""The keys, structures and YAML that the configuration file refuses, each with its line, reason and hint."""

from __future__ import annotations

import pytest

from pgsieve.pipelines.config.model import ConfigError, parse_config
from tests.fixtures.configs import (
    FILE,
    LEAST,
    assert_refused,
    read,
    refusal,
    with_published,
    with_source,
    with_subscription,
)

# refused: text, line, key, message, hint

SUBSCRIPTION_KEYS = "source, publications, row_filter, copy_data, origin, binary, streaming, two_phase, failover, disable_on_error, freshness, types, layout, history"

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
        "write threads[4], or threads[*] for one per core",
    ),
    "bytes that are no number": (
        LEAST + "spark: {conf: {spark.pgsieve.smallBytes: 8MB}}\n",
        (6, "spark.conf", "has spark.pgsieve.smallBytes, which is no number of bytes"),
        "write spark.pgsieve.smallBytes: 8388608",
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
        "the key above it is the name already; allowed here: conninfo, password, password_command, standby, allow_untested_server, slot, capture, publications",
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
        "write it in brackets, even a single entry: `[…]`",
    ),
    "text for a set": (
        with_published("{tables: [{table: a.b}], publish: insert}"),
        (3, "sources.shop.publications.emea.publish", "should be a list"),
        "write it in brackets, even a single entry: `[…]`",
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
        (6, "spark.conf", "is an alias of a value that contains it"),
        None,
    ),
    "a NUL": (
        LEAST.replace("./lake", '"a\\0b"'),
        (1, "lake", "contains NUL or invalid Unicode"),
        None,
    ),
    "a lone surrogate": (
        LEAST.replace("./lake", '"\\uD800"'),
        (1, "lake", "contains NUL or invalid Unicode"),
        None,
    ),
    # the environment
    "a variable that is not set": (
        LEAST.replace("dbname=shop", "'dbname=${SHOP_DB}'"),
        (3, "sources.shop.conninfo", "environment variable SHOP_DB is not set"),
        "set SHOP_DB, or $${ for a literal ${",
    ),
    "no variable's name": (
        LEAST.replace("./lake", "'a${1}'"),
        (1, "lake", "has a '${' without a variable's name and a '}'"),
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
    "an anchor twice": (
        LEAST.replace("./lake", "&lake ./lake") + "storage: &lake x\n",
        (6, "", "two values begin with & and the same name, as anchors do"),
        "put them in quotes",
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
        (
            "a key or value with : # { [ * ! or % needs quotes, and so does one that begins with a quote:"
            """ '"Sales"."Order Lines".amount': string"""
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_have_a_place_and_a_reason(case):
    assert_refused(*REFUSED[case])


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


def test_every_problem_is_reported_in_the_order_of_the_file():
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


def test_a_missing_source_is_reported_with_all_other_problems(tmp_path):
    text = LEAST.replace("source: shop", "source: shops, row_filter: publsher")
    with pytest.raises(ConfigError) as raised:
        parse_config(text, tmp_path / "pgsieve.yaml")
    assert [(p.key, p.message) for p in raised.value.problems] == [
        ("subscriptions.sales.row_filter", "should be one of pipeline, publisher"),
        ("subscriptions.sales.source", "is not a source of this file"),
    ]
