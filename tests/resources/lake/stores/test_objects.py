"""This library reaches objects of a store exactly if delta-rs does; otherwise it says that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.resources.lake.stores.objects import Objects, has_same_credentials, open_objects
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.s3_server import S3Server

_KEYS = "[default]\naws_access_key_id = AKIA7\naws_secret_access_key = s\n"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("credentials", _KEYS, False),
        ("config", "[default]\nsso_session = work\n", False),
        ("config", "[profile default]\ncredential_process=/bin/x\n", False),
        ("config", "[default]\nregion = eu-central-1\n", True),
        ("config", "[profile other]\nsso_session = work\n", True),
        ("other", _KEYS, True),
    ],
)
def test_credentials_of_a_profile_are_left_to_delta_rs(
    tmp_path: Path, name: str, text: str, found: bool
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / name).write_text(text)
    environ = {"HOME": str(tmp_path)}
    assert has_same_credentials("s3a://lake", {}, environ) is found
    named = {"HOME": "/nowhere", "AWS_CONFIG_FILE": str(tmp_path / ".aws" / name)}
    assert has_same_credentials("s3a://lake", {}, named) is (found and name != "other")
    # If credentials or an endpoint are given, or the platform is another one, delta-rs reads no profile either.
    for options in ({"AWS_ACCESS_KEY_ID": "AKIA7"}, {"aws_endpoint_url": "http://minio:9000"}):
        assert has_same_credentials("s3a://lake", options, environ)
    assert has_same_credentials("s3a://lake", {}, {**environ, "AWS_ACCESS_KEY_ID": "AKIA7"})
    assert has_same_credentials("gs://lake", {}, environ)


def test_both_libraries_use_the_configured_endpoint_whatever_the_environment_names(
    s3_server: S3Server, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    storage = Storage.from_address(s3_folder, s3_server.storage)
    store, path = Store.from_storage(storage), f"{storage.address}/a b/~41ü/x'y+z,&=@:!$()"
    store.touch(path)
    objects = open_objects(path, store.options)
    assert objects is not None
    assert objects.read(store.find_file_system(path)[1]) == b""
    objects.write(store.find_file_system(f"{path}.2")[1], b"2")
    assert store.has_file(f"{path}.2")


def test_an_object_is_created_once(s3_server: S3Server, s3_folder: str) -> None:
    storage = Storage.from_address(s3_folder, s3_server.storage)
    objects, name = (
        Objects("s3a://lake", storage.make_delta_rs_options()),
        f"{s3_folder.rpartition('/')[2]}/x",
    )
    objects.create(name, b"1")
    with pytest.raises(FileExistsError):
        objects.create(name, b"2")
    assert objects.read(name) == b"1"
    assert objects.read(f"{name}/none") is None


@pytest.mark.parametrize(
    ("lake", "options"),
    [
        ("abfss://lake@account.dfs.core.windows.net/x", {"account_key": "a2V5"}),
        ("abfss://lake@account.dfs.core.windows.net/x", {"sas_token": "sv=1&sig=2"}),
        (
            "abfss://lake@account.dfs.core.windows.net/x",
            {"tenant_id": "t", "client_id": "c", "client_secret": "s"},
        ),
        ("gs://lake/x", {}),
        ("s3://lake/x", {"path_style": "false", "endpoint": "http://minio:9000", "session_token": "t"}),
        ("s3://lake/x", {}),
    ],
)
def test_every_option_of_a_lake_is_understood(
    lake: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA7")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    storage = Storage.from_address(lake, options)
    assert open_objects(storage.address, Store.from_storage(storage).options) is not None


def test_a_folder_has_no_objects(tmp_path: Path) -> None:
    for path in (str(tmp_path), tmp_path.as_uri(), "hdfs://name/x"):
        assert open_objects(path, ()) is None


def test_a_store_that_cannot_be_opened_is_left_to_delta_rs(tmp_path: Path) -> None:
    storage = Storage.from_address("gs://lake", {"service_account": str(tmp_path / "none.json")})
    assert open_objects(storage.address, Store.from_storage(storage).options) is None
