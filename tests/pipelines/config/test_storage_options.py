"""`storage` in pgsieve.yaml: accepted and refused options. Its secrets are shown nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import Config, ConfigError, parse_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.stores import log_store
from pgsieve.resources.lake.stores.storage import find_storage
from pgsieve.resources.passwords import conceal_passwords

SECRET = "w9Kq+3zP/x7Lm2Vt"


def read(lake: str, storage: str, spark: str = "", **environ: str) -> Config:
    text = (
        f"lake: {lake}\nstorage: {storage}\n{spark}"
        "sources: {shop: {conninfo: dbname=shop}}\n"
        "subscriptions: {sales: {source: shop, publications: [p1]}}\n"
    )
    return parse_config(text, Path("/etc/pgsieve/pgsieve.yaml"), environ)


def test_options_come_from_the_environment_and_reach_both_engines() -> None:
    options = "{endpoint: 'http://minio:9000', access_key_id: AKIA7, secret_access_key: '${KEY}', path_style: false}"
    config = read("s3://bucket/lake", options, KEY=SECRET)
    lake = build_project(config).lake
    assert lake.uri == lake.engine.lake == "s3a://bucket/lake"
    storage = find_storage(lake.uri)
    assert storage.make_delta_rs_options()["aws_secret_access_key"] == SECRET
    assert storage.make_spark_settings({})["fs.s3a.secret.key"] == SECRET
    assert storage.make_spark_settings({})["fs.s3a.path.style.access"] == "false"


def test_secrets_are_in_no_repr_and_no_text() -> None:
    config = read("s3://bucket/lake", f"{{access_key_id: AKIA7, secret_access_key: '{SECRET}'}}")
    lake = build_project(config).lake
    assert SECRET not in repr(config) + repr(lake) + repr(find_storage(lake.uri)) + config.model_dump_json()
    # Dagster shows and records this of a resource.
    assert SECRET not in str(lake.get_resource_definition().config_schema.default_value)
    assert SECRET not in conceal_passwords(f"403 Forbidden: {SECRET}")


def test_secrets_among_the_settings_of_spark_are_in_no_repr_and_no_text() -> None:
    settings = {
        "spark.hadoop.fs.s3a.secret.key": SECRET,
        "spark.hadoop.fs.azure.account.key.shop.dfs.core.windows.net": SECRET[::-1],
        "spark.hadoop.hadoop.security.token.enabled": "true",
    }
    config = read("s3://bucket/lake", "{}", f"spark: {{conf: {json.dumps(settings)}}}\n")
    lake = build_project(config).lake
    for secret in (SECRET, SECRET[::-1]):
        assert secret not in repr(config) + repr(lake)
        assert secret not in conceal_passwords(f"403 Forbidden: {secret}")
    assert conceal_passwords("it is true") == "it is true"


@pytest.mark.parametrize(
    ("lake", "storage", "says"),
    [
        ("./lake", "{region: eu-1}", "storage.region: is not an option of a lake in a folder"),
        ("s3://b/l", "{account_key: k}", "storage.account_key: is not an option of a lake at s3a://"),
        ("s3://b/l", "{access_key_id: k}", "storage.access_key_id: needs secret_access_key"),
        (
            "s3://b/l",
            "{secret_access_key: ''}",
            "storage.secret_access_key: is empty\nhint: leave the key out for its default",
        ),
        ("s3://b/l", "{bucket: k}", "storage.bucket: unknown key"),
        ("s3://b/l", "{only_writer: delta-rs}", "storage.only_writer: should be one of spark"),
        ("abfss://l@a.dfs.core.windows.net", "{client_id: c}", "storage.client_id: needs client_secret"),
        ("gs://b/l", "{endpoint: e}", "storage.endpoint: is not an option of a lake at gs://"),
    ],
)
def test_refusals_have_a_place_and_a_reason(lake: str, storage: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(lake, storage)
    assert f"pgsieve.yaml:2: {says}" in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        *(
            (each, "does not begin with http:// or https://")
            for each in ("127.0.0.1:9000", "ftp://host", "//h")
        ),
        *(
            (f"{each}AKIA7:{SECRET}@minio:9000", "has a user or a password")
            for each in ("http://", "https://", "")
        ),
        *(
            (f"http://{each}", "is not the address of a server")
            for each in ("", "a b", "minio:99999", "minio:9000 ", "höst", "minio/?x=1", "minio#x", "[::1")
        ),
    ],
)
def test_an_endpoint_that_is_not_a_servers_address_is_refused(endpoint: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("s3://b/l", f"{{endpoint: {json.dumps(endpoint)}}}")
    assert f"pgsieve.yaml:2: storage.endpoint: {says}" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "http://HOST:PORT" in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "http://127.0.0.1:9000",
            "HTTP://minio_1/",
            "https://[::1]:9000",
            "https://a.supabase.co/storage/v1/s3",
        ),
        "https://s3.eu-central-1.amazonaws.com",
    ],
)
def test_an_endpoint_of_a_server_is_accepted(endpoint: str) -> None:
    assert read("s3://b/l", f"{{endpoint: '{endpoint}'}}").storage.endpoint == endpoint


@pytest.mark.parametrize(
    ("lake", "says"),
    [
        *((f"s3://b/a{c}b", f"has {c!r} in its path") for c in '%?#*\\^`"<>|{}[]'),
        ("s3a://b/a%20b", "has '%' in its path"),
        ("abfss://l@a.dfs.core.windows.net/a%20b", "has '%' in its path"),
        ("file:///lakes/a%20b", "has '%' in its path"),
        *((f"s3://b/{path}", "has an empty part") for path in ("a//b", "/a", "./a", "a/..", "a/../b")),
        *(
            (lake, "has no bucket, or more than a bucket's name")
            for lake in ("s3:/b/l", "s3:///l", "S3://", "gs:/b/l")
        ),
        (f"s3://AKIA7:{SECRET}@bucket/l", "has no bucket, or more than a bucket's name"),
        ("s3://bucket:9000/l", "has no bucket, or more than a bucket's name"),
        ("/lakes/[shop]", "is a path with '['"),
        ("./a%20b", "is a path with '%20'"),
    ],
)
def test_an_address_that_engines_read_as_different_places_is_refused(lake: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(json.dumps(lake), "{}")
    assert f"pgsieve.yaml:1: lake: {says}" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "lake", ["wasb://lake@shop.blob.core.windows.net", "oss://bucket/lake", "dbfs:/lake"]
)
def test_a_store_that_may_lose_commits_is_refused_unless_only_spark_writes(lake: str) -> None:
    with pytest.raises(PgsieveError, match="a commit could be lost") as caught:
        build_project(read(lake, "{}"))
    assert "storage: {only_writer: spark}" in str(caught.value.hint)
    assert build_project(read(lake, "{only_writer: spark}")).lake.uri == lake


@pytest.mark.parametrize(
    "lake", ["hdfs://name:8020/lake", "gs://b/l", "abfss://l@a.dfs.core.windows.net", "file:///lakes/shop"]
)
def test_a_store_that_keeps_the_first_of_two_commits_is_accepted(lake: str) -> None:
    assert build_project(read(lake, "{}")).lake.uri == lake


def test_another_log_store_on_s3_is_refused_unless_only_spark_writes() -> None:
    spark = f"spark: {{conf: {{{log_store.SETTING}: io.delta.storage.S3SingleDriverLogStore}}}}\n"
    with pytest.raises(PgsieveError, match=log_store.SETTING):
        build_project(read("s3://bucket/lake", "{}", spark))
    assert build_project(read("s3://bucket/lake", "{only_writer: spark}", spark))
