"""The S3 server of the demo: without its package it is refused, with the way out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from pgsieve.resources.lake.stores.embedded_s3 import EmbeddedS3Error, run_embedded_s3


def test_without_its_package_the_server_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("weed") is None
    with pytest.raises(EmbeddedS3Error) as refused, run_embedded_s3(tmp_path / "s3", "key", "secret"):
        pass
    assert "pip install 'pgsieve[demo-s3]'" in str(refused.value.hint)
    assert not (tmp_path / "s3").exists()
