"""Delta's jars in the bill of materials: group, name and version as in a Maven repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.sbom import jar


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("io.delta_delta-spark_4.1_2.13-4.4.0.jar", "pkg:maven/io.delta/delta-spark_4.1_2.13@4.4.0"),
        ("com.github.luben_zstd-jni-1.5.7-3.jar", "pkg:maven/com.github.luben/zstd-jni@1.5.7-3"),
        ("com.google.guava_guava-33.4.0-jre.jar", "pkg:maven/com.google.guava/guava@33.4.0-jre"),
        (
            "org.apache.logging.log4j_log4j-1.2-api-2.20.0.jar",
            "pkg:maven/org.apache.logging.log4j/log4j-1.2-api@2.20.0",
        ),
    ],
)
def test_a_jar_is_identified_by_its_coordinates(tmp_path: Path, name: str, url: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"")
    component = jar(file)
    assert component["purl"] == url
    assert component["hashes"][0]["content"].startswith("e3b0c442")


def test_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not have the form of Ivy's names"):
        jar(tmp_path / "pgsieve.jar")
