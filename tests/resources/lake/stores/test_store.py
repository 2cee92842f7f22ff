"""A store tells whether it takes a file, and nothing of that stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.s3_server import S3Server


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    Store().probe(tmp_path.as_uri(), ".probe")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_probe_of_s3_leaves_nothing(s3_server: S3Server, s3_folder: str) -> None:
    store = Store.of(Storage.of(s3_folder, s3_server.storage))
    store.probe(s3_folder, ".probe")
    assert ".probe" not in store.names(s3_folder)


def test_a_store_that_refuses_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-folder"):
        Store().probe(f"{tmp_path.as_uri()}/no-folder", ".probe")
