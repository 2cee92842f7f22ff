"""Each jar in the repository is compiled from the source beside it."""

from __future__ import annotations

import shutil
import zipfile

import pytest

from scripts import java

pytestmark = pytest.mark.slow


def in_jar(jar: java.Jar) -> dict[str, bytes]:
    with zipfile.ZipFile(jar.path) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.parametrize("jar", java.JARS, ids=lambda jar: jar.path.stem)
def test_the_manifest_has_the_digest_of_the_source(jar: java.Jar) -> None:
    manifest = in_jar(jar)["META-INF/MANIFEST.MF"].decode()
    assert f"X-Source-SHA256: {jar.digest[:48]}\r\n" in manifest
    assert f"pgsieve/lake/{jar.source.stem}.class" in in_jar(jar)
    assert all(f"{line}\r\n" in manifest for line in jar.manifest_lines)


@pytest.mark.drawn
@pytest.mark.skipif(shutil.which("javac") is None, reason="a JRE has no compiler")
@pytest.mark.parametrize("jar", java.JARS, ids=lambda jar: jar.path.stem)
def test_compiling_the_source_again_gives_the_same_classes(jar: java.Jar) -> None:
    files = in_jar(jar)
    if f"javac {java.compiler()}\r\n" not in files.pop("META-INF/MANIFEST.MF").decode():
        pytest.skip("another javac may write other bytes")
    assert java.compile_source(jar.source) == files
