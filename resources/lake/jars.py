"""The jars that a session needs besides Spark's, so that it starts without a request to a Maven repository.

In: Maven coordinates. Out: the jar files that Spark once resolved them to. With `spark.jars.packages` Spark
runs Ivy at every start of a session, even if all files are in Ivy's cache. Naming the files in `spark.jars`
gives the same class path, works offline and prints nothing. Only Ivy can tell which files belong to the
coordinates, as its folder has the jars of every package and version ever requested. So `fetch` starts a
session once, and records its answer in the Python environment. If the answer cannot be recorded, Ivy runs at
each start. `PGSIEVE_JARS` names a folder that `copy_jars` made on another machine; then no request is made.
Run as a program, this module fetches missing jars. Raises JarsUnavailableError.

https://spark.apache.org/docs/4.1.0/configuration.html#runtime-environment (spark.jars, spark.jars.packages)
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from urllib.parse import unquote, urlsplit

from pgsieve.decoding.wording import counted
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.java.class_archive import (
    FOLDER_VARIABLE,
    copy_archive,
    kept_folder,
    make_archive,
)
from pgsieve.resources.private_folder import private_folder

_LOGGER = logging.getLogger(__name__)

#: The file that records which jars belong to which packages.
_ANSWERS = "delta-jars.json"

_JARS, _PACKAGES, _EXCLUDES = "spark.jars", "spark.jars.packages", "spark.jars.excludes"
_IVY = "spark.jars.ivy"
#: The user's settings for repositories and for the access to them; a proxy is a Java option.
_REPOSITORIES = ("spark.jars.repositories", _IVY, "spark.driver.extraJavaOptions")

#: The AWS SDK that each hadoop-aws is built with; 3.4.1, for Spark 4.0, is built with 2.24.6, and was tested
#: with a later one.
_AWS_SDK = {"3.4.0": "2.23.19", "3.4.1": "2.29.52", "3.4.2": "2.29.52"}
#: The parts of the SDK that S3A uses; hadoop-aws itself requires all of it, 641 MB.
_AWS_PARTS = ("s3", "s3-transfer-manager", "sts")
_NOT_FROM_AWS = (
    "software.amazon.awssdk:bundle",
    # Spark has these; if the SDK's Netty comes before Spark's, the session stops.
    *("io.netty:*", "org.slf4j:slf4j-api", "commons-codec:commons-codec", "commons-logging:commons-logging"),
    # S3A needs these only with certain settings.
    "org.wildfly.openssl:wildfly-openssl",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3",
)


@dataclass(frozen=True)
class Packages:
    """Packages that are resolved together, and their exclusions; the first package needs the others."""

    coordinates: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The coordinates in the form of `spark.jars.packages`."""
        return ",".join(self.coordinates)


def delta_packages() -> Packages:
    """The Delta jars that fit the installed pyspark and delta-spark."""
    delta = version("delta-spark")
    # The artifact of Delta 4.0, which supports one Spark only, does not name it.
    spark = "" if delta.startswith("4.0.") else "_" + ".".join(version("pyspark").split(".")[:2])
    return Packages((f"io.delta:delta-spark{spark}_2.13:{delta}",))


def s3_packages() -> Packages:
    """S3A for the Hadoop of the installed pyspark, and the parts of the AWS SDK that it uses: 11 MB."""
    import pyspark

    (client,) = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    hadoop = client.stem.rpartition("-")[2]
    sdk = _AWS_SDK.get(hadoop, max(_AWS_SDK.values()))
    parts = (f"software.amazon.awssdk:{part}:{sdk}" for part in _AWS_PARTS)
    return Packages((f"org.apache.hadoop:hadoop-aws:{hadoop}", *parts), _NOT_FROM_AWS)


class JarsUnavailableError(SparkUnavailableError):
    """Spark lacks jars that cannot be fetched."""


def answers_file() -> Path:
    """The file of recorded answers."""
    return kept_folder() / _ANSWERS


def kept_jars(packages: str, kept: Path | None = None) -> list[str] | None:
    """The jar files of `packages` and all their dependencies.

    None without a recorded answer, or if a file is gone.
    """
    file = kept or answers_file()
    try:
        names: list[str] = json.loads(file.read_text(encoding="utf-8"))[packages]
        jars = [file.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [str(jar) for jar in jars] if all(jar.is_file() for jar in jars) else None


def keep_jars(packages: str, spark_jars: str, kept: Path | None = None) -> None:
    """Record the answer for `packages`: the value of `spark.jars` in a session that resolved only these."""
    jars = [unquote(urlsplit(uri).path) for uri in spark_jars.split(",")]
    _keep({packages: jars}, kept or answers_file())


def _keep(added: Mapping[str, list[str]], kept: Path) -> None:
    """Add answers to the recorded ones, atomically, as another process may do the same."""
    answers = {}
    with suppress(OSError, ValueError, TypeError):
        answers = dict(json.loads(kept.read_text(encoding="utf-8")))
    written = kept.with_name(f".{kept.name}.{os.getpid()}")
    with suppress(OSError):
        written.write_text(json.dumps({**answers, **added}, indent=2) + "\n", encoding="utf-8")
        written.replace(kept)


def fetch(needed: Iterable[Packages], conf: Mapping[str, str], kept: Path | None = None) -> None:
    """Fetch missing jars once, which may take a minute, and say so on stderr.

    `conf` has the user's settings: its repositories are used, and the packages that it names are left to
    Spark. `kept` is another file for the answers. Raises JarsUnavailableError if a repository does not
    answer, or if PGSIEVE_JARS names a folder without the jars.
    """
    file = kept or answers_file()
    for packages in _pgsieves(needed, conf):
        if kept_jars(packages.name, file) is not None:
            continue
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder:
            raise JarsUnavailableError(
                f'{FOLDER_VARIABLE} is "{folder}", which has no jars of {packages.coordinates[0]}',
                hint="on a machine that reaches a Maven repository, `pgsieve jars FOLDER` of this version makes the folder",
            )
        if os.access(file.parent, os.W_OK):
            own = {name: value for name, value in conf.items() if name.startswith(_REPOSITORIES)}
            # Without a home, Ivy would store the files in a folder of the process that runs it.
            lasting = {} if jvm.has_writable_home() else {_IVY: str(file.parent / "ivy")}
            _fetch(packages, {**lasting, **own}, file)


def _fetch(packages: Packages, repositories: Mapping[str, str], file: Path) -> None:
    """Have a separate process fetch the jars, because Ivy runs only when a JVM starts."""
    _report(f"fetching the jars of {packages.coordinates[0]} for Spark, once")
    began = monotonic()
    done = subprocess.run(  # noqa: S603 - our own interpreter, no shell
        [sys.executable, "-m", "pgsieve.resources.lake.jars", packages.name, str(file)],
        input=json.dumps(dict(repositories)),
        capture_output=True,
        text=True,
        check=False,
    )
    jars = kept_jars(packages.name, file)
    if done.returncode or jars is None:
        raise JarsUnavailableError(
            f"the jars of {packages.coordinates[0]} cannot be fetched: {_reason(done.stdout + done.stderr)}",
            hint="Spark's settings `spark.jars.repositories` and `spark.jars.ivySettings` name another Maven repository; or run"
            f" `pgsieve jars FOLDER` on another machine, and set {FOLDER_VARIABLE}=FOLDER here",
        )
    size = sum(Path(jar).stat().st_size for jar in jars) / 1e6
    _report(f"fetched {counted(len(jars), 'jar')}, {size:.0f} MB, in {monotonic() - began:.0f} s")


def _report(line: str) -> None:
    """Print a line on stderr, and log it."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    _LOGGER.info(line)


def _reason(output: str) -> str:
    """The most informative line in the output of Ivy or the JVM."""
    lines = [line.strip(" :\t") for line in output.splitlines()]
    for pattern in (
        r"Server access error|Host .* not found",
        r"unresolved dependency|not found",
        r"^Caused by",
        r"rror|xception",
    ):
        if line := next((line for line in lines if re.search(pattern, line)), None):
            return line
    return "no repository said why"


def copy_jars(folder: Path, needed: Iterable[Packages], kept: Path | None = None) -> None:
    """Copy the present jars into a folder for PGSIEVE_JARS, on this machine or another. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for packages in needed:
        jars = [Path(jar) for jar in kept_jars(packages.name, kept) or []]
        for jar in jars:
            if not (folder / jar.name).exists():
                shutil.copyfile(jar, folder / jar.name)
        _keep({packages.name: [jar.name for jar in jars]}, folder / _ANSWERS)
    copy_archive(folder)


def class_path(
    needed: Iterable[Packages], jars: Iterable[str], conf: Mapping[str, str], kept: Path | None = None
) -> dict[str, str]:
    """The settings that give a session pgsieve's jars, together with the jars and packages of the user's settings.

    If the user's settings name the first package of a set, in any version, pgsieve leaves out the set.
    """
    users = _listed(conf, _PACKAGES)
    files = list(jars)
    packages: list[str] = []
    excluded: list[str] = []
    for each in _pgsieves(needed, conf):
        if answer := kept_jars(each.name, kept):
            files += answer
        else:
            packages += each.coordinates
            excluded += each.excluded
    settings = {
        _JARS: [*files, *_listed(conf, _JARS)],
        _PACKAGES: [*packages, *users],
        _EXCLUDES: [*excluded, *_listed(conf, _EXCLUDES)],
    }
    return {name: ",".join(values) for name, values in settings.items() if values}


def _pgsieves(needed: Iterable[Packages], conf: Mapping[str, str]) -> list[Packages]:
    """The sets whose first package is not in the user's settings."""
    theirs = {_artifact(coordinate) for coordinate in _listed(conf, _PACKAGES)}
    return [each for each in needed if _artifact(each.coordinates[0]) not in theirs]


def _listed(conf: Mapping[str, str], name: str) -> list[str]:
    return [part for each in conf.get(name, "").split(",") if (part := each.strip())]


def _artifact(coordinate: str) -> str:
    """Group and artifact, without the versions in the artifact's name, such as `_4.1_2.13`."""
    group, artifact = coordinate.split(":")[:2]
    return f"{group}:{artifact.partition('_')[0]}"


def _resolved(packages: Packages, repositories: Mapping[str, str]) -> str:
    """The value of `spark.jars` in a session that resolves the packages."""
    settings = {_PACKAGES: packages.name, _EXCLUDES: ",".join(packages.excluded)}
    session = jvm.session(
        {"spark.master": "local[1]", "spark.ui.enabled": "false", **repositories, **settings}
    )
    jars = session.conf.get(_JARS) or ""
    session.stop()
    return jars


def private_answers() -> tuple[Path, dict[str, str]]:
    """A file for answers, and settings for fetching, if this user may not write to the Python environment.

    The file and the jars exist as long as this process.
    """
    folder = private_folder()
    return folder / _ANSWERS, {_IVY: str(folder / "ivy")}


def all_packages() -> list[Packages]:
    """Every set that some lake needs."""
    return [delta_packages(), s3_packages()]


def main() -> None:
    """Fetch missing jars. With arguments: only the named set, recorded in the named file, with settings from stdin."""
    if len(sys.argv) > 1:
        (packages,) = (each for each in all_packages() if each.name == sys.argv[1])
        keep_jars(packages.name, _resolved(packages, json.load(sys.stdin)), Path(sys.argv[2]))
        return
    fetch(all_packages(), {})
    make_archive()


if __name__ == "__main__":
    try:
        main()
    except JarsUnavailableError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
