"""The configuration file: what is accepted means what the documentation says, what is refused says where and why."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.identifiers import parse_qualified, quote
from pgsieve.pipelines.config.model import Config, ConfigError, SourceConfig, load_config, parse_config
from pgsieve.pipelines.config.values import slot_name

FILE = Path("/etc/pgsieve/pgsieve.yaml")

WHOLE = """\
lake: ./lake
spark:
  master: local[*]
  conf: {spark.driver.memory: 4g, spark.sql.shuffle.partitions: 8, spark.ui.enabled: false}
sources:
  shop:
    conninfo: "host=db dbname=shop user=pgsieve"
    slot: shop_slot
    capture: shop_capture
    publications:
      emea:
        tables:
          - {table: public.orders, where: "region = 'EMEA'", columns: [id, Region, '"Amount"']}
          - table: '"Sales"."Order ""Big"" Lines"'
        publish: [insert, update]
        publish_via_partition_root: true
subscriptions:
  sales:
    source: shop
    publications: [p1, "P 2", emea]
    row_filter: pipeline
    copy_data: true
    origin: any
    binary: false
    streaming: parallel
    two_phase: false
    disable_on_error: false
    types: {public.orders.amount: string, 'public."Lines".qty': "decimal(10,2)"}
"""

LEAST = """\
lake: ./lake
sources:
  shop: {conninfo: dbname=shop}
subscriptions:
  sales: {source: shop, publications: [p1]}
"""


def read(text: str, **environ: str) -> Config:
    return parse_config(text, FILE, environ)


def refusal(text: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(text, **environ)
    return caught.value


def outcome(text: str, **environ: str) -> Config | ConfigError:
    """What reading gives, where either will do."""
    try:
        return read(text, **environ)
    except ConfigError as error:
        return error


def with_source(line: str) -> str:
    return LEAST.replace("{conninfo: dbname=shop}", f"{{conninfo: dbname=shop, {line}}}")


def with_subscription(line: str) -> str:
    return LEAST.replace("publications: [p1]}", f"publications: [p1], {line}}}")


def with_published(line: str) -> str:
    return with_source(f"publications: {{emea: {line}}}")


# What is accepted


def test_every_key_of_the_documented_file_is_read():
    config = read(WHOLE)
    assert config.path == FILE
    assert config.spark.master == "local[*]"
    source = config.sources["shop"]
    assert (source.name, source.slot, source.capture) == ("shop", "shop_slot", "shop_capture")
    assert source.conninfo.get_secret_value() == "host=db dbname=shop user=pgsieve"
    publication = source.publications["emea"]
    assert publication.publish == {"insert", "update"}
    assert publication.publish_via_partition_root is True
    orders, lines = publication.tables
    assert (orders.relation, orders.where) == (("public", "orders"), "region = 'EMEA'")
    assert orders.columns == ("id", "region", "Amount")
    assert (lines.relation, lines.where, lines.columns) == (("Sales", 'Order "Big" Lines'), None, None)
    subscription = config.subscriptions["sales"]
    assert (subscription.name, subscription.source) == ("sales", "shop")
    assert subscription.publications == ("p1", "P 2", "emea")
    assert subscription.type_overrides == {
        ("public", "orders", "amount"): "string",
        ("public", "Lines", "qty"): "decimal(10,2)",
    }


def test_all_tables_may_leave_some_out():
    publication = (
        read(with_published('{all_tables: true, except: [public.t, \'"S"."U"\']}'))
        .sources["shop"]
        .publications["emea"]
    )
    assert publication.all_tables
    assert publication.excluded == (("public", "t"), ("S", "U"))


def test_sequences_are_published_with_or_without_tables():
    def published(text: str):
        return read(with_published(text)).sources["shop"].publications["emea"]

    assert published("{sequences: [public.t, 'S.\"U\"']}").published_sequences == (
        ("public", "t"),
        ("s", "U"),
    )
    assert published("{tables: [{table: a.b}], all_sequences: true}").all_sequences


def test_defaults_are_those_of_create_subscription_and_create_publication():
    config = read(with_published("{tables: [{table: public.t}]}"))
    subscription = config.subscriptions["sales"]
    assert subscription.model_dump(exclude={"name", "source", "publications"}) == {
        "row_filter": "pipeline",
        "copy_data": True,
        "origin": "any",
        "binary": False,
        "streaming": "parallel",
        "two_phase": False,
        "failover": False,
        "disable_on_error": False,
        "freshness": timedelta(minutes=15),
        "types": {},
        "layout": {
            "cluster_by": None,
            "properties": {},
            "target_file_size": None,
            "folders": "{schema}/{table}",
            "tables": {},
        },
    }
    publication = config.sources["shop"].publications["emea"]
    assert publication.publish == {"insert", "update", "delete", "truncate"}
    assert publication.publish_via_partition_root is False
    assert config.spark.master == "local[*]"
    assert config.spark.conf == {}


def test_slot_and_capture_are_named_after_the_source():
    source = read(LEAST.replace("shop", "Shop_EU")).sources["Shop_EU"]
    assert (source.slot, source.capture) == ("pgsieve_shop_eu", "pgsieve_shop_eu")


def test_a_subscription_has_a_slot_of_its_own_named_after_both():
    assert read(LEAST).subscriptions["sales"].slot == "pgsieve_shop_sales"


def test_a_capture_of_a_long_name_leaves_room_for_what_tells_captures_apart():
    # PostgreSQL would cut what is longer, suffix and all, and two captures would be one.
    source = read(LEAST.replace("shop", "s" * 63)).sources["s" * 63]
    assert (len(source.slot), len(source.capture)) == (63, 54)


def test_a_long_slot_name_is_cut_to_63_and_stays_distinct():
    first, second = slot_name("s" * 63, "a" * 63), slot_name("s" * 63, "b" * 63)
    assert len(first) == len(second) == 63
    assert first != second
    assert re.fullmatch(r"[a-z0-9_]{1,63}", first)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *(("off", "off"), ("on", "on"), ("parallel", "parallel"), ('"off"', "off"), ("'on'", "on")),
        *(("false", "off"), ("true", "on"), ("Parallel", "parallel"), ("OFF", "off")),
    ],
)
def test_streaming_is_read_bare_and_quoted(written, meant):
    assert read(with_subscription(f"streaming: {written}")).subscriptions["sales"].streaming == meant


@pytest.mark.parametrize(
    ("written", "meant"), [("on", True), ("off", False), ("yes", True), ('"false"', False)]
)
def test_booleans_are_read_as_postgresql_reads_them(written, meant):
    assert read(with_subscription(f"binary: {written}")).subscriptions["sales"].binary is meant


@pytest.mark.parametrize(("written", "meant"), [("none", "none"), ("NONE", "none"), ('"Any"', "any")])
def test_origin_is_read_without_regard_to_case(written, meant):
    assert read(with_subscription(f"origin: {written}")).subscriptions["sales"].origin == meant


@pytest.mark.parametrize("name", ["no", "on", "y", "2020", "010", "12:30", "1e3", "2020-01-01", "true"])
def test_names_that_yaml_1_1_reads_as_something_else_are_names(name):
    assert read(LEAST.replace("[p1]", f"[{name}]")).subscriptions["sales"].publications == (name,)


def test_spark_settings_are_the_text_that_is_written():
    config = read(LEAST + "spark: {conf: {a: 010, b: true, c: 1_000, d: 0.10, e: '4g'}}\n")
    assert config.spark.conf == {"a": "010", "b": "true", "c": "1_000", "d": "0.10", "e": "4g"}


def test_spark_settings_given_in_python_become_text():
    config = Config.model_validate({**_python(), "spark": {"conf": {"a": True, "b": 8, "c": "x"}}})
    assert config.spark.conf == {"a": "true", "b": "8", "c": "x"}


@pytest.mark.parametrize(
    ("lake", "meant"),
    [
        ("./lake", "/etc/pgsieve/lake"),
        ("../lake/", "/etc/lake"),
        ("/data/lake", "/data/lake"),
        ("s3a://bucket/lake/", "s3a://bucket/lake"),
        ("file:/data/lake", "file:/data/lake"),
        ("hdfs:///lake", "hdfs:///lake"),
        ("~/lake", f"{Path.home()}/lake"),
    ],
)
def test_a_relative_lake_is_beside_the_file_and_a_uri_stays(lake, meant):
    assert read(LEAST.replace("./lake", lake)).lake == meant


def test_environment_variables_are_replaced_in_values():
    text = LEAST.replace("dbname=shop", "'host=${HOST} dbname=${DB}'")
    assert (
        read(text, HOST="db", DB="shop").sources["shop"].conninfo.get_secret_value() == "host=db dbname=shop"
    )


def test_a_doubled_dollar_keeps_the_brace_and_a_single_dollar_is_a_dollar():
    text = LEAST.replace("dbname=shop", "'dbname=$${HOST} user=a$b password=c$'")
    assert read(text).sources["shop"].conninfo.get_secret_value() == "dbname=${HOST} user=a$b password=c$"


def test_a_variable_is_not_read_again_inside_a_variable():
    text = LEAST.replace("dbname=shop", "'dbname=${A}'")
    assert read(text, A="${B}", B="x").sources["shop"].conninfo.get_secret_value() == "dbname=${B}"


def test_an_alias_repeats_its_anchor():
    text = (
        LEAST
        + "  more: {source: shop, publications: &p [p1, p2]}\n  same: {source: shop, publications: *p}\n"
    )
    assert read(text).subscriptions["same"].publications == ("p1", "p2")


@pytest.mark.parametrize("conninfo", ["'postgresql://u@h:5432/d?sslmode=require'", "service=shop", "''"])
def test_every_form_of_conninfo_of_libpq_is_accepted(conninfo):
    assert read(LEAST.replace("dbname=shop", conninfo)).sources["shop"].conninfo is not None


def test_the_conninfo_is_in_no_repr():
    text = LEAST.replace("dbname=shop", '"dbname=shop password=${PW}"')
    config = read(text, PW="s3cr3t")
    assert "s3cr3t" not in f"{config!r} {config} {config.sources['shop']!r} {config.model_dump()}"


def test_a_config_does_not_change():
    config = read(LEAST)
    with pytest.raises(ValueError, match="frozen"):
        config.lake = "/elsewhere"


# Where the file is


def test_the_file_is_the_argument_then_the_variable_then_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml", "pgsieve.yaml"):
        (tmp_path / name).write_text(LEAST)
    variable = {"PGSIEVE_CONFIG": str(tmp_path / "b.yaml")}
    assert load_config(Path("a.yaml"), variable).path == tmp_path / "a.yaml"
    assert load_config(None, variable).path == tmp_path / "b.yaml"
    assert load_config(None, {}).path == tmp_path / "pgsieve.yaml"
    assert load_config(None, {"PGSIEVE_CONFIG": ""}).path == tmp_path / "pgsieve.yaml"
    assert load_config(None, {}).lake == str(tmp_path / "lake")
    assert load_config(None, {}).state_folder == tmp_path / ".pgsieve"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + LEAST.encode())
    assert load_config(file, {}).sources.keys() == {"shop"}


def test_a_missing_file_is_named(tmp_path):
    file = tmp_path / "nowhere.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert caught.value.message == f"{file}: cannot be read: No such file or directory"
    assert caught.value.hint == "name the file with -c/--config or PGSIEVE_CONFIG"
    assert (caught.value.file, caught.value.line, caught.value.key) == (file, None, "")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path, {})


def test_a_file_that_is_not_utf_8_is_refused_with_the_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes(b"lake: x\nsources: \xff\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert caught.value.message == f"{file}:2: not UTF-8"


# What is refused: text, line, key, message, hint

OBJECT = "write it as it is on the server, unquoted"
FOLDER = (
    "letters, digits and underscores, no underscore first, 63 at most: "
    "it becomes a folder of the lake and part of an asset key"
)
SUBSCRIPTION_KEYS = "source, publications, row_filter, copy_data, origin, binary, streaming, two_phase, failover, disable_on_error, freshness, types, layout"
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


# Configs made in Python


def _python() -> dict[str, object]:
    return {
        "path": "/x/pgsieve.yaml",
        "lake": "lake",
        "sources": {"shop": {"conninfo": "dbname=shop"}},
        "subscriptions": {"sales": {"source": "shop", "publications": ["p1"]}},
    }


def test_a_config_made_in_python_follows_the_same_rules():
    config = Config.model_validate(_python())
    assert (config.lake, config.sources["shop"].slot) == ("/x/lake", "pgsieve_shop")
    broken = {**_python(), "subscriptions": {"sales": {"source": "shops", "publications": ["p1"]}}}
    with pytest.raises(PgsieveError, match=r"subscriptions\.sales\.source: is not a source of this file"):
        Config.model_validate(broken)


def test_a_source_made_in_python_has_its_defaults():
    source = SourceConfig.model_validate({"name": "eu", "conninfo": "dbname=x"})
    assert (source.slot, source.capture) == ("pgsieve_eu", "pgsieve_eu")


# Choosing subscriptions


def test_no_name_selects_every_subscription_and_names_select_in_the_order_of_the_file():
    config = read(
        LEAST + "  b: {source: shop, publications: [p1]}\n  a: {source: shop, publications: [p1]}\n"
    )
    assert [each.name for each in config.selected(())] == ["sales", "b", "a"]
    assert [each.name for each in config.selected(("a", "sales"))] == ["sales", "a"]


def test_an_unknown_subscription_is_named_with_its_neighbour():
    with pytest.raises(PgsieveError) as caught:
        read(LEAST).selected(("sale",))
    assert caught.value.message == "subscription 'sale' is not in pgsieve.yaml"
    assert caught.value.hint == "did you mean 'sales'? allowed here: sales"


def test_a_file_without_subscriptions_has_nothing_to_select():
    with pytest.raises(PgsieveError, match=r"pgsieve\.yaml has no subscriptions"):
        read(LEAST[: LEAST.index("subscriptions")]).selected(())


# Names as SQL writes them


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("public.orders", ("public", "orders")),
        ("Public.ORDERS", ("public", "orders")),
        ('"Public"."a.b"', ("Public", "a.b")),
        ('a."b""c"', ("a", 'b"c')),
        ("größe.ÄÖ", ("größe", "ÄÖ")),
        ("a$1._b", ("a$1", "_b")),
    ],
)
def test_qualified_names_are_read_as_sql_reads_them(text, parts):
    assert parse_qualified(text, 2) == parts


@pytest.mark.parametrize(
    "text", ["", ".", "a.", ".a", "a..b", 'a."b', 'a"b".c', "a.b c", "a.1b", "a. b", '"a""', "a;b"]
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ValueError, match="is not a name as SQL writes it"):
        parse_qualified(text, 2)


def test_an_empty_and_a_long_name_are_refused():
    with pytest.raises(ValueError, match="has an empty name between double quotes"):
        parse_qualified('a.""', 2)
    with pytest.raises(ValueError, match="has a name longer than 63 bytes"):
        parse_qualified(f"a.{'b' * 64}", 2)


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=15), min_size=1, max_size=3
    )
)
def test_a_quoted_name_is_read_back(parts):
    assert parse_qualified(quote(*parts), len(parts)) == tuple(parts)


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


# Retention


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("36 hours", timedelta(hours=36)),
        ("1 day", timedelta(days=1)),
        ("2 weeks", timedelta(weeks=2)),
        ("off", timedelta()),
        ("forever", None),
    ],
)
def test_retention_is_written_as_people_say_it(written, kept):
    config = parse_config(LEAST + f"retention: {{change_log: {written}}}\n", FILE, {})
    assert config.retention.change_log == kept
    assert config.retention.versions == timedelta(days=7)


@pytest.mark.parametrize(
    "written",
    [
        "change_log: 7",
        "changes: -1 days",
        "versions: 1 hour",
        "versions: off",
        "versions: forever",
        "x: 1 day",
    ],
)
def test_a_retention_that_is_none_is_refused(written):
    with pytest.raises(ConfigError, match="retention"):
        parse_config(LEAST + f"retention: {{{written}}}\n", FILE, {})


def test_a_source_that_is_missing_is_told_beside_what_else_is_wrong(tmp_path):
    text = LEAST.replace("source: shop", "source: shops, row_filter: publsher")
    with pytest.raises(ConfigError) as raised:
        parse_config(text, tmp_path / "pgsieve.yaml")
    assert [(p.key, p.message) for p in raised.value.problems] == [
        ("subscriptions.sales.row_filter", "should be one of pipeline, publisher"),
        ("subscriptions.sales.source", "is not a source of this file"),
    ]
