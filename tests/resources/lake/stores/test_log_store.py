"""The jar of the log store is made of the source that is beside it."""

from __future__ import annotations

import shutil
import zipfile

import pytest

from pgsieve.resources.lake.stores.log_store import CLASS, JAR
from scripts import log_store

_CLASS_FILE = CLASS.replace(".", "/") + ".class"


def in_jar() -> dict[str, bytes]:
    with zipfile.ZipFile(JAR) as jar:
        return {name: jar.read(name) for name in jar.namelist()}


def test_the_manifest_names_the_source_as_it_is() -> None:
    assert f"X-Source-SHA256: {log_store.digest()[:48]}\r\n" in in_jar()["META-INF/MANIFEST.MF"].decode()
    assert _CLASS_FILE in in_jar()


@pytest.mark.skipif(shutil.which("javac") is None, reason="a JRE has no compiler")
def test_compiling_the_source_again_gives_the_same_classes() -> None:
    files = in_jar()
    if f"javac {log_store.compiler()}\r\n" not in files.pop("META-INF/MANIFEST.MF").decode():
        pytest.skip("another javac may write other bytes")
    assert log_store.compiled() == files
