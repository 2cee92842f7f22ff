"""Secrets of Spark reach Spark, and neither what Dagster stores and shows nor messages. No JVM."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import pytest
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._serdes import serialize_value
from pyspark.errors import PySparkException

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.engine import _find_engine
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake import session
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.passwords import conceal_passwords

#: Secrets of Spark: a parameter of the server's address, a setting, a Java option, and the password of a repository.
#: The source neither answers nor refuses: a connection would wait until its timeout.
WITH_SECRETS = """
lake: ./lake
sources: {shop: {conninfo: "host=203.0.113.1 dbname=shop connect_timeout=60"}}
subscriptions: {sales: {source: shop, publications: [p]}}
spark:
  master: sc://127.0.0.1:1/;token=geheimes-wort;user_id=me
  conf:
    spark.hadoop.fs.s3a.secret.key: geheimer-wert
    spark.app.name: mine
    spark.driver.extraJavaOptions: -Dhttps.proxyHost=proxy -Dhttps.proxyPassword=geheimwort
    spark.jars.repositories: https://plain/maven,https://me:geheim@wort@repository/maven
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration with secrets of Spark."""
    path = tmp_path / "pgsieve.yaml"
    path.write_text(WITH_SECRETS)
    return path


def test_no_secret_of_spark_is_in_what_dagster_stores_and_shows(file: Path) -> None:
    config = load_config(file)
    shown = [
        serialize_value(RepositorySnap.from_def(build_ui_definitions(config).get_repository_def())),
        repr(config),
        repr(build_project(config).lake.engine),
    ]
    assert "spark.app.name" in shown[0]
    assert not [text for text in shown if "geheim" in text]


def test_spark_gets_the_secrets_and_no_message_has_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_project(load_config(file)).lake.engine
    assert engine.conf == {
        "spark.hadoop.fs.s3a.secret.key": "geheimer-wert",
        "spark.app.name": "mine",
        "spark.driver.extraJavaOptions": "-Dhttps.proxyHost=proxy -Dhttps.proxyPassword=geheimwort",
        "spark.jars.repositories": "https://plain/maven,https://me:geheim@wort@repository/maven",
    }
    assert "geheim" not in conceal_passwords("".join(engine.conf.values()))
    servers = []

    def refuse(server: str) -> None:
        servers.append(server)
        raise PySparkException(f"cannot reach {server}\nmore")

    monkeypatch.setattr(session, "_create_connect_session", refuse)
    with pytest.raises(SparkUnavailableError) as caught:
        assert engine.session
    assert servers == ["sc://127.0.0.1:1/;token=geheimes-wort;user_id=me"]
    assert str(caught.value).startswith('no Spark Connect session at "sc://127.0.0.1:1": ')
    assert "geheim" not in conceal_passwords(str(caught.value))
    with pytest.raises(PgsieveError) as refused:
        _find_engine(load_config(file))
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("server", ["127.0.0.1:1", "127.0.0.1"])
def test_a_token_in_an_address_without_the_slash_is_in_no_message(file: Path, server: str) -> None:
    file.write_text(WITH_SECRETS.replace("127.0.0.1:1/", server))
    engine = build_project(load_config(file)).lake.engine
    assert "geheim" not in engine.master
    if ":" in server:  # Otherwise pyspark looks for a host of this name, for minutes.
        environment = dict(os.environ)
        with pytest.raises(SparkUnavailableError, match=f'at "sc://{server}": ') as caught:
            assert engine.session
        assert "geheim" not in "".join(traceback.format_exception(caught.value))
        assert dict(os.environ) == environment, "a local session could not start in this process any more"


def test_a_server_of_spark_connect_that_does_not_answer_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pyspark asks it for ten minutes, without a word."""
    engine = build_project(load_config(file)).lake.engine

    def ask(server: str) -> None:
        time.sleep(1)
        raise PySparkException(
            "<_InactiveRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n"
            '\tdetails = "failed to connect to all addresses"\n\tdebug_error_string = "more"\n>'
        )

    monkeypatch.setattr(session, "_create_connect_session", ask)
    monkeypatch.setattr(session, "_SILENT_SECONDS", 0.1)
    with pytest.raises(SparkUnavailableError, match="failed to connect") as caught:
        assert engine.session
    assert caught.value.message.endswith('at "sc://127.0.0.1:1": failed to connect to all addresses')
    waiting = 'waiting for Spark Connect at "sc://127.0.0.1:1", for up to ten minutes\n'
    assert capsys.readouterr().err == waiting
