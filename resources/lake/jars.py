"""Fetches the jars that Spark sessions need besides Spark's own. That is done once; later sessions start offline.

In: the Maven coordinates of packages.
Out: the jar files of these packages and their dependencies.

With the setting `spark.jars.packages`, Spark runs the tool Ivy each time a session starts. Ivy finds the
dependencies of the packages, and downloads their jars. Even if all jars are already in Ivy's cache, this takes
time and prints lines. If the setting `spark.jars` lists the same files, the session has the same class path, and
Ivy does not run. Ivy's folder contains the jars of all packages and versions that were ever requested, so only Ivy
itself knows which of the files belong to which coordinates. So for each set of packages `fetch_packages` starts one
session with Ivy, and records in the Python environment which files this session got: the resolution. If the resolution cannot
be recorded, Ivy runs each time a session starts.

The variable `PGSIEVE_JARS` names a folder that `copy_jars` has made on another machine. With this variable
no request is sent. Run as a program, this module fetches the jars that are missing. Raises JarsUnavailableError.

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
from threading import Lock
from time import monotonic
from urllib.parse import unquote, urlsplit

from pgsieve.decoding.wording import quantity
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.java.class_archive import (
    FOLDER_VARIABLE,
    copy_archive,
    find_jars_folder,
    make_archive,
)
from pgsieve.resources.passwords import conceal_passwords
from pgsieve.resources.private_folder import private_folder

_LOGGER = logging.getLogger(__name__)

#: The name of the file of resolutions: a JSON object that maps each set of packages to its jars.
_RESOLUTIONS_NAME = "delta-jars.json"

_JARS_SETTING, _PACKAGES_SETTING, _EXCLUDES_SETTING = (
    "spark.jars",
    "spark.jars.packages",
    "spark.jars.excludes",
)
_IVY_SETTING = "spark.jars.ivy"
#: The user's settings whose names begin with these choose a Maven repository, or the access to it. The Java options are
#: among them, because they may choose a proxy.
_REPOSITORY_SETTINGS = ("spark.jars.repositories", _IVY_SETTING, "spark.driver.extraJavaOptions")

#: Maps each version of hadoop-aws to the version of the AWS SDK to use with it. hadoop-aws 3.4.1, which belongs to
#: Spark 4.0, was built with SDK 2.24.6; pgsieve was tested with a later one.
_AWS_SDK = {"3.4.0": "2.23.19", "3.4.1": "2.29.52", "3.4.2": "2.29.52"}
#: The parts of the AWS SDK that S3A, Hadoop's file system for S3, uses. hadoop-aws requires the whole SDK, which
#: has 641 MB.
_AWS_PARTS = ("s3", "s3-transfer-manager", "sts")
_EXCLUDED_FROM_AWS = (
    "software.amazon.awssdk:bundle",
    # Spark itself has these. If the session found the SDK's Netty before Spark's Netty, it would not start.
    *("io.netty:*", "org.slf4j:slf4j-api", "commons-codec:commons-codec", "commons-logging:commons-logging"),
    # S3A needs these only with certain settings.
    "org.wildfly.openssl:wildfly-openssl",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3",
)

#: The run and the thread that starts Spark early may need the same jars. The first one fetches them with this lock.
_FETCH_LOCK = Lock()


@dataclass(frozen=True)
class Packages:
    """A set of packages that are resolved together.

    The first package needs the others. `excluded_dependencies` are dependencies to leave out.
    """

    coordinates: tuple[str, ...]
    excluded_dependencies: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The coordinates, written as in `spark.jars.packages`."""
        return ",".join(self.coordinates)


def list_delta_packages() -> Packages:
    """The packages of Delta that fit the installed versions of pyspark and delta-spark."""
    delta_version = version("delta-spark")
    # The name of the artifact contains the version of Spark. Delta 4.0 supports only one version, and leaves it out.
    spark_suffix = (
        "" if delta_version.startswith("4.0.") else "_" + ".".join(version("pyspark").split(".")[:2])
    )
    return Packages((f"io.delta:delta-spark{spark_suffix}_2.13:{delta_version}",))


def list_s3_packages() -> Packages:
    """The packages of S3A that fit the Hadoop of the installed pyspark, and the parts of the AWS SDK that S3A uses: 11 MB."""
    import pyspark

    (client_jar,) = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    hadoop_version = client_jar.stem.rpartition("-")[2]
    sdk_version = _AWS_SDK.get(hadoop_version, max(_AWS_SDK.values()))
    parts = (f"software.amazon.awssdk:{part}:{sdk_version}" for part in _AWS_PARTS)
    return Packages((f"org.apache.hadoop:hadoop-aws:{hadoop_version}", *parts), _EXCLUDED_FROM_AWS)


class JarsUnavailableError(SparkUnavailableError):
    """Spark needs jars that cannot be fetched."""


def find_resolutions_path() -> Path:
    """The file of resolutions, in the Python environment."""
    return find_jars_folder() / _RESOLUTIONS_NAME


def find_recorded_jars(packages: str, resolutions_path: Path | None = None) -> list[str] | None:
    """The jar files of `packages` and all their dependencies.

    None if no resolution is recorded, or if one of the files no longer exists. `resolutions_path` replaces the default
    file of resolutions.
    """
    resolutions_path = resolutions_path or find_resolutions_path()
    try:
        names: list[str] = json.loads(resolutions_path.read_text(encoding="utf-8"))[packages]
        jars = [resolutions_path.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [str(jar) for jar in jars] if all(jar.is_file() for jar in jars) else None


def record_jars(packages: str, spark_jars: str, resolutions_path: Path | None = None) -> None:
    """Record the resolution of `packages`.

    `spark_jars` is the value of `spark.jars` in a session with these packages only.
    """
    jars = [unquote(urlsplit(uri).path) for uri in spark_jars.split(",")]
    _write_resolutions({packages: jars}, resolutions_path or find_resolutions_path())


def _write_resolutions(jars_by_packages: Mapping[str, list[str]], resolutions_path: Path) -> None:
    """Add resolutions to a file.

    The file is replaced as a whole, because another process may do the same at the same time.
    """
    former_resolutions = {}
    with suppress(OSError, ValueError, TypeError):
        former_resolutions = dict(json.loads(resolutions_path.read_text(encoding="utf-8")))
    temporary_path = resolutions_path.with_name(f".{resolutions_path.name}.{os.getpid()}")
    with suppress(OSError):
        temporary_path.write_text(
            json.dumps({**former_resolutions, **jars_by_packages}, indent=2) + "\n", encoding="utf-8"
        )
        temporary_path.replace(resolutions_path)


def fetch_packages(
    package_sets: Iterable[Packages], conf: Mapping[str, str], resolutions_path: Path | None = None
) -> None:
    """Fetch the jars that are missing. This happens once, may take a minute, and is reported on stderr.

    Does nothing if this user may not write into the folder of the file of resolutions.

    `conf` are the user's settings. If they name repositories, the jars come from there. Packages that these settings
    name are left to Spark. `resolutions_path` replaces the default file of resolutions. Raises JarsUnavailableError if
    a repository does not answer, or if PGSIEVE_JARS names a folder without the jars.
    """
    resolutions_path = resolutions_path or find_resolutions_path()
    with _FETCH_LOCK:
        for packages in _list_own_packages(package_sets, conf):
            if find_recorded_jars(packages.name, resolutions_path) is None:
                _fetch_missing(packages, conf, resolutions_path)


def _fetch_missing(packages: Packages, conf: Mapping[str, str], resolutions_path: Path) -> None:
    """Fetch the jars of a set of packages. Does nothing, and raises errors, in the same cases as `fetch_packages`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        raise JarsUnavailableError(
            f'{FOLDER_VARIABLE} is "{folder}", which has no jars of {packages.coordinates[0]}',
            hint="on a machine that reaches a Maven repository, `pgsieve jars FOLDER` of this version makes the folder",
        )
    if os.access(resolutions_path.parent, os.W_OK):
        repositories = {name: value for name, value in conf.items() if name.startswith(_REPOSITORY_SETTINGS)}
        # If the user has no home directory, Ivy would store the jars in a temporary folder, which soon disappears.
        ivy_settings = {} if jvm.has_writable_home() else {_IVY_SETTING: str(resolutions_path.parent / "ivy")}
        _fetch(packages, {**ivy_settings, **repositories}, resolutions_path)


def _fetch(packages: Packages, repositories: Mapping[str, str], resolutions_path: Path) -> None:
    """Fetch the jars in a separate process, because Ivy runs only when a JVM starts."""
    _report(f"fetching the jars of {packages.coordinates[0]} for Spark, once")
    start_time = monotonic()
    process = subprocess.run(  # noqa: S603 - our own interpreter, no shell
        [sys.executable, "-m", "pgsieve.resources.lake.jars", packages.name, str(resolutions_path)],
        input=json.dumps(dict(repositories)),
        capture_output=True,
        text=True,
        check=False,
    )
    jars = find_recorded_jars(packages.name, resolutions_path)
    if process.returncode or jars is None:
        raise JarsUnavailableError(
            f"the jars of {packages.coordinates[0]} cannot be fetched: {_find_reason(process.stdout + process.stderr)}",
            hint=f"name another Maven repository in Spark's settings `spark.jars.repositories` or `spark.jars.ivySettings`; or run `pgsieve jars FOLDER` on another machine, and set {FOLDER_VARIABLE}=FOLDER here",
        )
    size = sum(Path(jar).stat().st_size for jar in jars) / 1e6
    _report(f"fetched {quantity(len(jars), 'jar')}, {size:.0f} MB, in {monotonic() - start_time:.0f} s")


def _report(line: str) -> None:
    """Print a line on stderr, and write it to the log."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    _LOGGER.info(line)


def _find_reason(output: str) -> str:
    """The line in the output of Ivy or the JVM that says most about the cause, without the credentials in its URLs."""
    lines = [line.strip(" :\t") for line in output.splitlines()]
    for pattern in (
        r"Server access error|Host .* not found",
        r"unresolved dependency|not found",
        r"^Caused by",
        r"rror|xception",
    ):
        if line := next((line for line in lines if re.search(pattern, line)), None):
            return conceal_passwords(re.sub(r"://[^/\s]*@", "://", line))
    return "no repository gave a reason"


def copy_jars(folder: Path, package_sets: Iterable[Packages], resolutions_path: Path | None = None) -> None:
    """Copy the fetched jars into a folder, for PGSIEVE_JARS on this machine or another machine. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for packages in package_sets:
        jars = [Path(jar) for jar in find_recorded_jars(packages.name, resolutions_path) or []]
        for jar in jars:
            if not (folder / jar.name).exists():
                shutil.copyfile(jar, folder / jar.name)
        _write_resolutions({packages.name: [jar.name for jar in jars]}, folder / _RESOLUTIONS_NAME)
    copy_archive(folder)


def make_class_path_settings(
    package_sets: Iterable[Packages],
    jars: Iterable[str],
    conf: Mapping[str, str],
    resolutions_path: Path | None = None,
) -> dict[str, str]:
    """The settings with the jars that a session needs: pgsieve's jars, and the jars in the user's settings (`conf`).

    If the user's settings contain the first package of a set, in any version, pgsieve leaves out this set.
    """
    user_packages = _split_setting(conf, _PACKAGES_SETTING)
    files = list(jars)
    coordinates: list[str] = []
    excluded_dependencies: list[str] = []
    for packages in _list_own_packages(package_sets, conf):
        if recorded_files := find_recorded_jars(packages.name, resolutions_path):
            files += recorded_files
        else:
            coordinates += packages.coordinates
            excluded_dependencies += packages.excluded_dependencies
    settings = {
        _JARS_SETTING: [*files, *_split_setting(conf, _JARS_SETTING)],
        _PACKAGES_SETTING: [*coordinates, *user_packages],
        _EXCLUDES_SETTING: [*excluded_dependencies, *_split_setting(conf, _EXCLUDES_SETTING)],
    }
    return {name: ",".join(values) for name, values in settings.items() if values}


def _list_own_packages(package_sets: Iterable[Packages], conf: Mapping[str, str]) -> list[Packages]:
    """The sets whose first package the user's settings do not contain."""
    user_artifacts = {
        _find_artifact_name(coordinate) for coordinate in _split_setting(conf, _PACKAGES_SETTING)
    }
    return [
        packages
        for packages in package_sets
        if _find_artifact_name(packages.coordinates[0]) not in user_artifacts
    ]


def _split_setting(conf: Mapping[str, str], name: str) -> list[str]:
    """The values of a setting that has values separated by commas."""
    return [value for text in conf.get(name, "").split(",") if (value := text.strip())]


def _find_artifact_name(coordinate: str) -> str:
    """Group and artifact of a package. Versions in the name of the artifact, such as `_4.1_2.13`, are left out."""
    group, artifact = coordinate.split(":")[:2]
    return f"{group}:{artifact.partition('_')[0]}"


def _resolve(packages: Packages, repositories: Mapping[str, str]) -> str:
    """Start a session that resolves the packages. Return its value of `spark.jars`."""
    settings = {_PACKAGES_SETTING: packages.name, _EXCLUDES_SETTING: ",".join(packages.excluded_dependencies)}
    session = jvm.start_session(
        {"spark.master": "local[1]", "spark.ui.enabled": "false", **repositories, **settings}
    )
    jars = session.conf.get(_JARS_SETTING) or ""
    session.stop()
    return jars


def make_private_resolutions() -> tuple[Path, dict[str, str]]:
    """A file and settings for `fetch_packages`, for a user who may not write to the Python environment.

    The file and the jars exist until this process ends.
    """
    folder = private_folder()
    return folder / _RESOLUTIONS_NAME, {_IVY_SETTING: str(folder / "ivy")}


def list_all_packages() -> list[Packages]:
    """The sets of packages that some lake may need."""
    return [list_delta_packages(), list_s3_packages()]


def main() -> None:
    """Fetch the jars that are missing.

    With arguments (the name of a set of packages, and a file of resolutions), resolve only this set, and record it in
    this file. The settings come from standard input.
    """
    if len(sys.argv) > 1:
        (packages,) = (candidate for candidate in list_all_packages() if candidate.name == sys.argv[1])
        record_jars(packages.name, _resolve(packages, json.load(sys.stdin)), Path(sys.argv[2]))
        return
    fetch_packages(list_all_packages(), {})
    make_archive()


if __name__ == "__main__":
    try:
        main()
    except JarsUnavailableError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
