"""Lists the components of an installation in a CycloneDX document: `make sbom` writes build/sbom.cdx.json.

In: the Python in which pgsieve is installed, and the program `cyclonedx-py`. Out: the packages with versions,
licences and dependencies, from that program, and Delta's jars from a Maven repository. Spark's own jars are part
of the package pyspark. https://cyclonedx.org/docs/1.6/json/
"""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pgsieve.resources.lake.jars import find_recorded_jars, list_all_packages

#: Ivy's name of a jar: group, artifact and version, which may contain a hyphen (1.5.7-3, 33.0-jre).
_JAR = re.compile(r"(?P<group>[^_]+)_(?P<name>.+?)-(?P<version>\d[^-]*(?:-(?:\d+|jre|android))?)\.jar")


def jar(file: Path) -> dict[str, Any]:
    """A jar as a component."""
    match = _JAR.fullmatch(file.name)
    if match is None:
        raise ValueError(f"{file.name} does not have the form of Ivy's names")
    group, name, version = match["group"], match["name"], match["version"]
    url = f"pkg:maven/{group}/{name}@{version}"
    return {
        "type": "library",
        "bom-ref": url,
        "group": group,
        "name": name,
        "version": version,
        "purl": url,
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
    }


def document(cyclonedx: str, python: str, pyproject: str) -> dict[str, Any]:
    """The document of an environment, with the jars."""
    command = [cyclonedx, "environment", python, "--pyproject", pyproject, "--output-reproducible"]
    process = subprocess.run([*command, "--spec-version", "1.6"], capture_output=True, text=True, check=True)
    sbom: dict[str, Any] = json.loads(process.stdout)
    command = [python, "-c", "from importlib.metadata import version; print(version('pgsieve'))"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    sbom["metadata"]["component"]["version"] = version
    files = {
        Path(name) for packages in list_all_packages() for name in find_recorded_jars(packages.name) or []
    }
    sbom["components"] += sorted((jar(file) for file in files), key=lambda each: str(each["bom-ref"]))
    return sbom


def main() -> None:
    """Write the document; arguments: cyclonedx-py, Python, pyproject.toml, the file to write."""
    cyclonedx, python, pyproject, target = sys.argv[1:]
    file = Path(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    sbom = document(cyclonedx, python, pyproject)
    file.write_text(json.dumps(sbom, indent=2) + "\n", encoding="utf-8")
    sys.stderr.write(f"{file}: {len(sbom['components'])} components\n")


if __name__ == "__main__":
    main()
