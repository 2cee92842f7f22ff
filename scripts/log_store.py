"""Make resources/lake/stores/log_store/pgsieve-log-store.jar of the Java source beside it: the same bytes at each build.

The manifest has the digest of the source, and the javac that compiled it. Needs a JDK, and the jars that `make setup`
fetches. Run as a program, this module writes the jar; `compiled` is also the tests' way to see that it is the source's.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyspark

from pgsieve.resources.lake.jars import delta_packages, kept_jars, s3_packages
from pgsieve.resources.lake.stores.log_store import JAR, SOURCE

#: Spark 4 needs this Java or a newer one.
_RELEASE = "17"
_MANIFEST = "META-INF/MANIFEST.MF"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def digest() -> str:
    """The digest of the source."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def compiler() -> str:
    """The major version of javac; raises FileNotFoundError where there is none."""
    said = subprocess.run(["javac", "-version"], capture_output=True, text=True, check=True)
    found = re.search(r"javac (\d+)", said.stdout + said.stderr)
    if found is None:
        raise RuntimeError(f"javac said {said.stdout + said.stderr!r}")
    return found[1]


def compiled() -> dict[str, bytes]:
    """The class files of the source, by their names in the jar."""
    jars = [str(jar) for jar in Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")]
    jars += [jar for jar in kept_jars(delta_packages().name) or [] if "delta-storage" in jar]
    jars += kept_jars(s3_packages().name) or []
    with tempfile.TemporaryDirectory() as folder:
        command = ["javac", "--release", _RELEASE, "-Xlint:all,-classfile", "-Werror", "-g:none"]
        subprocess.run([*command, "-cp", ":".join(jars), "-d", folder, str(SOURCE)], check=True)
        classes = sorted(Path(folder).rglob("*.class"))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in classes}


def manifest() -> str:
    """What the manifest says."""
    lines = ["Manifest-Version: 1.0", f"Created-By: javac {compiler()}", f"X-Source-SHA256: {digest()[:48]}"]
    return "".join(f"{line}\r\n" for line in [*lines, ""])


def main() -> int:
    """Write the jar."""
    files = {_MANIFEST: manifest().encode(), **compiled()}
    with zipfile.ZipFile(JAR, "w", zipfile.ZIP_DEFLATED) as jar:
        for name, content in files.items():
            jar.writestr(zipfile.ZipInfo(name, _LONG_AGO), content, zipfile.ZIP_DEFLATED)
    sys.stdout.write(f"{JAR}: {JAR.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
