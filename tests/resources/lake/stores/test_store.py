"""A store tells whether it takes a file, and nothing of that stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.resources.lake.stores.store import Store


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    Store().probe(tmp_path.as_uri(), ".probe")
    assert not list(tmp_path.iterdir())


def test_a_store_that_refuses_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-folder"):
        Store().probe(f"{tmp_path.as_uri()}/no-folder", ".probe")
