"""The configuration file: accepted keys mean what the documentation says."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import Config, ConfigError, SourceConfig, load_config, parse_config
from pgsieve.pipelines.config.values import make_slot_name
from tests.fixtures.configs import (
    FILE,
    LEAST,
    WHOLE,
    read,
    with_published,
    with_subscription,
)

# accepted


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


def test_all_tables_may_exclude_some():
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
            "columns": None,
            "deletes": None,
            "properties": {},
            "target_file_size": None,
            "folders": "{schema}/{table}",
            "names": "published",
            "tables": {},
        },
        "history": {"initial": None, "scd2": None, "tables": {}},
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


def test_a_capture_with_a_long_name_leaves_room_for_the_suffixes():
    # PostgreSQL would truncate a longer name with its suffix, and two captures would have the same name.
    source = read(LEAST.replace("shop", "s" * 63)).sources["s" * 63]
    assert (len(source.slot), len(source.capture)) == (63, 54)


def test_a_long_slot_name_is_cut_to_63_and_stays_distinct():
    first, second = make_slot_name("s" * 63, "a" * 63), make_slot_name("s" * 63, "b" * 63)
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


def test_spark_settings_are_texts_as_written():
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
def test_a_relative_lake_is_relative_to_the_file_and_a_uri_stays(lake, meant):
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
    assert [each.name for each in config.select(())] == ["sales", "b", "a"]
    assert [each.name for each in config.select(("a", "sales"))] == ["sales", "a"]


def test_an_unknown_subscription_is_named_with_its_neighbour():
    with pytest.raises(PgsieveError) as caught:
        read(LEAST).select(("sale",))
    assert caught.value.message == "subscription 'sale' is not in pgsieve.yaml"
    assert caught.value.hint == "did you mean 'sales'? allowed here: sales"


def test_a_file_without_subscriptions_has_nothing_to_select():
    with pytest.raises(PgsieveError, match=r"pgsieve\.yaml has no subscriptions"):
        read(LEAST[: LEAST.index("subscriptions")]).select(())


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
