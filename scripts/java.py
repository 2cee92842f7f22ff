"""Build pgsieve's own jars, each from the Java source beside it. All builds give the same bytes.

A jar's manifest has the digest of the source, and the version of javac. Needs a JDK, and the jars that `make
setup` fetches. As a program, this module writes the jars; tests use `compile_source` to compare them with their
sources.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pyspark

from pgsieve.resources.lake.engine import server
from pgsieve.resources.lake.jars import find_recorded_jars, list_delta_packages, list_s3_packages
from pgsieve.resources.lake.java import login
from pgsieve.resources.lake.stores import log_store

#: Spark 4 needs this Java or a newer one.
_RELEASE = "17"
#: The jars of Spark that pgsieve's sources use.
_SPARK_JARS = (
    "hadoop-client-api",
    "scala-library",
    *(f"spark-{part}_2.13" for part in ("core", "common-utils", "catalyst", "sql", "sql-api", "connect")),
)
_MANIFEST = "META-INF/MANIFEST.MF"
#: The time of all files in a jar, so that builds give the same bytes.
_FILE_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Jar:
    """A jar of pgsieve: its path, the source of its one class, and further lines of its manifest."""

    path: Path
    source: Path
    manifest_lines: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The digest of the source."""
        return hashlib.sha256(self.source.read_bytes()).hexdigest()


JARS = (
    Jar(log_store.JAR, log_store.SOURCE),
    Jar(login.AGENT, login.SOURCE, ("Premain-Class: pgsieve.lake.LoginUser",)),
    Jar(server.JAR, server.SOURCE),
)


def compiler() -> str:
    """The major version of javac; raises FileNotFoundError if there is no javac."""
    javac = subprocess.run(["javac", "-version"], capture_output=True, text=True, check=True)
    output = javac.stdout + javac.stderr
    match = re.search(r"javac (\d+)", output)
    if match is None:
        raise RuntimeError(f"javac printed {output!r}")
    return match[1]


def compile_source(source: Path) -> dict[str, bytes]:
    """Compile a source; return the class files by their names in the jar."""
    folder = Path(pyspark.__file__).parent / "jars"
    jars = [str(jar) for name in _SPARK_JARS for jar in sorted(folder.glob(f"{name}-[0-9]*.jar"))]
    jars += [jar for jar in find_recorded_jars(list_delta_packages().name) or [] if "delta-storage" in jar]
    jars += find_recorded_jars(list_s3_packages().name) or []
    with tempfile.TemporaryDirectory() as folder:
        command = ["javac", "--release", _RELEASE, "-Xlint:all,-classfile", "-Werror", "-g:none"]
        subprocess.run([*command, "-cp", ":".join(jars), "-d", folder, str(source)], check=True)
        classes = sorted(Path(folder).rglob("*.class"))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in classes}


def manifest(jar: Jar) -> str:
    """The text of a jar's manifest."""
    lines = [
        "Manifest-Version: 1.0",
        f"Created-By: javac {compiler()}",
        f"X-Source-SHA256: {jar.digest[:48]}",
    ]
    return "".join(f"{line}\r\n" for line in [*lines, *jar.manifest_lines, ""])


def main() -> int:
    """Write the jars."""
    for each in JARS:
        files = {_MANIFEST: manifest(each).encode(), **compile_source(each.source)}
        with zipfile.ZipFile(each.path, "w", zipfile.ZIP_DEFLATED) as jar:
            for name, content in files.items():
                jar.writestr(zipfile.ZipInfo(name, _FILE_TIME), content, zipfile.ZIP_DEFLATED)
        sys.stdout.write(f"{each.path}: {each.path.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
