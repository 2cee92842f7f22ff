"""One address and one set of options, translated for both engines."""

from __future__ import annotations

import pytest

from pgsieve.resources.lake.spark_settings import (
    UnsafeLogStoreError,
    make_session_config,
    make_storage_settings,
    verify_log_store_settings,
)
from pgsieve.resources.lake.stores import log_store
from pgsieve.resources.lake.stores.storage import Storage, declare_storage, find_storage
from pgsieve.resources.passwords import conceal_passwords

MINIO = {
    "endpoint": "http://minio:9000",
    "access_key_id": "AKIA7",
    "secret_access_key": "x7Qm-secret-2Lp",
}
ABFSS = "abfss://lake@shop.dfs.core.windows.net/replicas"


@pytest.mark.parametrize("written", ["s3://bucket/lake", "s3a://bucket/lake/", "S3://bucket/lake"])
def test_s3_has_one_address_for_both_engines(written: str) -> None:
    storage = Storage.from_address(written)
    assert (storage.address, storage.platform, storage.folder) == ("s3a://bucket/lake", "s3", None)


@pytest.mark.parametrize(
    ("address", "is_safe"),
    [
        ("/lakes/shop", True),
        ("file:///lakes/shop", True),
        ("s3://bucket/lake", True),
        (ABFSS, True),
        ("gs://bucket/lake", True),
        ("hdfs://name:8020/lake", True),
        ("dbfs:/lake", False),
        ("hdfs:/lake", True),
        ("wasb://lake@shop.blob.core.windows.net", False),
        ("oss://bucket/lake", False),
    ],
)
def test_a_store_is_safe_if_it_keeps_the_first_of_two_commits(address: str, is_safe: bool) -> None:
    assert Storage.from_address(address).has_atomic_commits is is_safe


def test_a_private_s3_server_in_the_options_of_both_engines() -> None:
    storage = Storage.from_address("s3://bucket/lake", MINIO)
    assert storage.make_delta_rs_options({}) == {
        "aws_endpoint_url": "http://minio:9000",
        "aws_endpoint_url_s3": "http://minio:9000",
        "aws_access_key_id": "AKIA7",
        "aws_secret_access_key": "x7Qm-secret-2Lp",
        "aws_conditional_put": "etag",
        "aws_allow_http": "true",
        "aws_virtual_hosted_style_request": "false",
    }
    assert storage.make_spark_settings({}) == {
        "fs.s3a.endpoint": "http://minio:9000",
        "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.path.style.access": "true",
        "fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
        "fs.s3a.access.key": "AKIA7",
        "fs.s3a.secret.key": "x7Qm-secret-2Lp",
    }


def test_without_options_both_engines_read_the_same_as_aws_tools() -> None:
    storage = Storage.from_address("s3://bucket/lake")
    assert storage.make_delta_rs_options({}) == {"aws_conditional_put": "etag"}
    chain = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
    assert storage.make_spark_settings({}) == {"fs.s3a.aws.credentials.provider": chain}
    assert storage.make_spark_settings({"AWS_ENDPOINT_URL": "https://store:1", "AWS_REGION": "eu-1"}) == {
        "fs.s3a.endpoint": "https://store:1",
        "fs.s3a.endpoint.region": "eu-1",
        "fs.s3a.path.style.access": "true",
        "fs.s3a.aws.credentials.provider": chain,
    }


@pytest.mark.parametrize(
    ("endpoint", "path_style", "delta_rs", "spark"),
    [
        ("http://minio:9000", None, ("http://minio:9000", "false"), ("http://minio:9000", "true")),
        ("http://minio:9000", "true", ("http://minio:9000", "false"), ("http://minio:9000", "true")),
        ("http://minio:9000", "false", ("http://bucket.minio:9000", "true"), ("http://minio:9000", "false")),
        ("https://bucket.host/x", "false", ("https://bucket.host/x", "true"), ("https://host/x", "false")),
        ("https://bucket.host", "true", ("https://bucket.host", "false"), ("https://bucket.host", "true")),
        (
            "http://10.0.0.7:9000",
            "false",
            ("http://10.0.0.7:9000", "false"),
            ("http://10.0.0.7:9000", "true"),
        ),
        ("http://[::1]:9000", "false", ("http://[::1]:9000", "false"), ("http://[::1]:9000", "true")),
        (None, "true", (None, "false"), (None, "true")),
        (None, "false", (None, "true"), (None, "false")),
        (None, None, (None, None), (None, None)),
    ],
)
def test_both_engines_have_the_bucket_in_the_path_or_in_the_hosts_name(
    endpoint: str | None,
    path_style: str | None,
    delta_rs: tuple[str | None, str | None],
    spark: tuple[str | None, str | None],
) -> None:
    given = {"endpoint": endpoint, "path_style": path_style}
    storage = Storage.from_address(
        "s3://bucket/lake", {name: value for name, value in given.items() if value}
    )
    options, settings = storage.make_delta_rs_options({}), storage.make_spark_settings({})
    assert (options.get("aws_endpoint_url"), options.get("aws_virtual_hosted_style_request")) == delta_rs
    assert options.get("aws_endpoint_url_s3") == options.get("aws_endpoint_url")
    assert (settings.get("fs.s3a.endpoint"), settings.get("fs.s3a.path.style.access")) == spark


def test_a_session_token_needs_the_provider_that_reads_it() -> None:
    storage = Storage.from_address("s3://bucket/lake", {**MINIO, "session_token": "t"})
    settings = storage.make_spark_settings({})
    assert settings["fs.s3a.session.token"] == storage.make_delta_rs_options()["aws_session_token"] == "t"
    assert settings["fs.s3a.aws.credentials.provider"].endswith(".TemporaryAWSCredentialsProvider")


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_both_engines_use_the_server_of_the_environment(name: str) -> None:
    storage = Storage.from_address("s3://bucket/lake")
    environ = {name: "http://store:1"}
    options = storage.make_delta_rs_options(environ)
    assert (options["aws_endpoint_url"], options["aws_allow_http"]) == ("http://store:1", "true")
    assert storage.make_spark_settings(environ)["fs.s3a.endpoint"] == "http://store:1"
    own = Storage.from_address("s3://bucket/lake", MINIO)
    assert (
        own.make_delta_rs_options(environ)["aws_endpoint_url"]
        == own.make_spark_settings(environ)["fs.s3a.endpoint"]
    )


@pytest.mark.parametrize(
    ("endpoint", "imitates"),
    [
        (None, False),
        ("https://s3.eu-central-1.amazonaws.com", False),
        ("https://bucket.vpce-1a2b.s3.eu-1.vpce.amazonaws.com", False),
        ("https://s3.cn-north-1.amazonaws.com.cn", False),
        ("http://minio:9000", True),
        ("https://amazonaws.com.example.org", True),
        ("https://notamazonaws.com", True),
    ],
)
def test_a_server_that_imitates_s3_is_recognised_by_its_name(endpoint: str | None, imitates: bool) -> None:
    options = {} if endpoint is None else {"endpoint": endpoint}
    assert Storage.from_address("s3://bucket/lake", options).is_s3_imitation({}) is imitates


def test_azure_in_the_options_of_both_engines() -> None:
    account = "shop.dfs.core.windows.net"
    by_key = Storage.from_address(ABFSS, {"account_key": "k"})
    assert by_key.make_delta_rs_options() == {"azure_storage_account_key": "k"}
    assert by_key.make_spark_settings({}) == {f"fs.azure.account.key.{account}": "k"}
    by_role = Storage.from_address(ABFSS)
    assert by_role.make_delta_rs_options() == {}
    assert by_role.make_spark_settings({})[f"fs.azure.account.oauth.provider.type.{account}"].endswith(
        ".MsiTokenProvider"
    )
    principal = {"tenant_id": "t", "client_id": "c", "client_secret": "s"}
    by_principal = Storage.from_address(ABFSS, principal)
    assert set(by_principal.make_delta_rs_options().values()) == {"t", "c", "s"}
    endpoint = by_principal.make_spark_settings({})[f"fs.azure.account.oauth2.client.endpoint.{account}"]
    assert endpoint.endswith("/t/oauth2/token")


def test_google_in_the_options_of_both_engines() -> None:
    storage = Storage.from_address("gs://bucket/lake", {"service_account": "/keys/lake.json"})
    assert storage.make_delta_rs_options() == {"google_service_account": "/keys/lake.json"}
    settings = storage.make_spark_settings({})
    assert settings["fs.gs.auth.service.account.json.keyfile"] == "/keys/lake.json"
    assert Storage.from_address("gs://bucket/lake").make_spark_settings({}) == {}


def test_secrets_are_in_no_repr_no_text_and_no_command_that_starts_a_jvm() -> None:
    storage = Storage.from_address("s3://bucket/lake", MINIO)
    declare_storage(storage)
    assert find_storage("s3a://bucket/lake") is storage
    assert "x7Qm" not in repr(storage)
    assert "x7Qm" not in conceal_passwords("403 for AKIA7, x7Qm-secret-2Lp")
    assert "x7Qm" not in str(make_session_config("local[1]", {}, storage))


def test_a_session_for_s3_has_the_log_store_and_its_jar() -> None:
    config = make_session_config("local[1]", {}, Storage.from_address("s3://bucket/lake"))
    assert config[log_store.SETTING] == log_store.CLASS
    assert str(log_store.JAR) in config["spark.jars"].split(",")
    assert log_store.SETTING not in make_session_config("local[1]", {}, Storage.from_address("/lakes/shop"))


def test_the_users_settings_of_the_file_system_are_kept() -> None:
    storage = Storage.from_address("s3://bucket/lake", MINIO)
    own = {"spark.hadoop.fs.s3a.endpoint": "https://other"}
    assert storage.make_spark_settings({}).keys() - make_storage_settings(storage, own).keys() == {
        "fs.s3a.endpoint"
    }


@pytest.mark.parametrize("setting", [log_store.SETTING, "spark.delta.logStore.class"])
def test_another_log_store_on_s3_is_refused_unless_only_spark_writes(setting: str) -> None:
    conf = {setting: "io.delta.storage.S3SingleDriverLogStore"}
    with pytest.raises(UnsafeLogStoreError, match=setting):
        verify_log_store_settings(Storage.from_address("s3://bucket/lake"), conf)
    verify_log_store_settings(Storage.from_address("s3://bucket/lake", is_written_only_by_spark=True), conf)
    verify_log_store_settings(Storage.from_address("/lakes/shop"), conf)
    verify_log_store_settings(Storage.from_address("s3://bucket/lake"), {setting: log_store.CLASS})
