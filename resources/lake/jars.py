"""The jars that a session needs besides Spark's, so that it starts without asking a Maven repository for them.

In: Maven coordinates. Out: the jar files that Spark once resolved them to. Spark runs Ivy at every start of a
session with `spark.jars.packages`, even where all files are in Ivy's cache; naming the files in `spark.jars`
gives the same class path, works offline and prints nothing. Which files belong to the coordinates is known
only to Ivy (its folder of jars holds those of every package and version ever asked for), so the first
session's answer is kept beside the environment that it holds for. Run as a program, this module starts a
session for each set of packages without an answer. Raises nothing where it cannot be kept: then Ivy is asked again.

https://spark.apache.org/docs/4.1.0/configuration.html#runtime-environment (spark.jars, spark.jars.packages)
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Where the answers are kept: in the virtual environment, which is made anew when versions change.
KEPT = Path(sys.prefix) / "delta-jars.json"

_JARS, _PACKAGES, _EXCLUDES = "spark.jars", "spark.jars.packages", "spark.jars.excludes"

#: The AWS SDK that each hadoop-aws is built with.
_AWS_SDK = {"3.4.0": "2.23.19", "3.4.1": "2.24.6", "3.4.2": "2.29.52"}
#: The parts of the SDK that S3A uses; hadoop-aws itself asks for all of it, 641 MB.
_AWS_PARTS = ("s3", "s3-transfer-manager", "sts")
_NOT_FROM_AWS = (
    "software.amazon.awssdk:bundle",
    # Spark has these; the SDK's Netty before Spark's stops the session.
    *("io.netty:*", "org.slf4j:slf4j-api", "commons-codec:commons-codec", "commons-logging:commons-logging"),
    # S3A asks for these only where settings say so.
    "org.wildfly.openssl:wildfly-openssl",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3",
)


@dataclass(frozen=True)
class Packages:
    """Packages that are resolved together, the first of which needs the others, and what is left out of them."""

    coordinates: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As `spark.jars.packages` has them."""
        return ",".join(self.coordinates)


def delta_packages() -> Packages:
    """The Delta jars that fit the installed pyspark and delta-spark."""
    spark = ".".join(version("pyspark").split(".")[:2])
    return Packages((f"io.delta:delta-spark_{spark}_2.13:{version('delta-spark')}",))


def s3_packages() -> Packages:
    """Hadoop's S3A of the installed pyspark's Hadoop, and of the AWS SDK what it uses: 11 MB."""
    import pyspark

    (client,) = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    hadoop = client.stem.rpartition("-")[2]
    sdk = _AWS_SDK.get(hadoop, max(_AWS_SDK.values()))
    parts = (f"software.amazon.awssdk:{part}:{sdk}" for part in _AWS_PARTS)
    return Packages((f"org.apache.hadoop:hadoop-aws:{hadoop}", *parts), _NOT_FROM_AWS)


def kept_jars(packages: str, kept: Path = KEPT) -> list[str] | None:
    """Return the jar files of `packages` and all they depend on; None without an answer or where one is gone."""
    try:
        jars: list[str] = json.loads(kept.read_text(encoding="utf-8"))[packages]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return jars if all(Path(jar).is_file() for jar in jars) else None


def keep_jars(packages: str, spark_jars: str, kept: Path = KEPT) -> None:
    """Keep what Spark made of `packages`: the value of `spark.jars` in a session that resolved nothing else."""
    jars = [unquote(urlsplit(uri).path) for uri in spark_jars.split(",")]
    answers = {}
    with suppress(OSError, ValueError, TypeError):
        answers = dict(json.loads(kept.read_text(encoding="utf-8")))
    with suppress(OSError):
        kept.write_text(json.dumps({**answers, packages: jars}, indent=2) + "\n", encoding="utf-8")


def class_path(
    needed: Iterable[Packages], jars: Iterable[str], conf: Mapping[str, str], kept: Path = KEPT
) -> dict[str, str]:
    """The settings with which a session has what pgsieve needs, and what the user's own settings add to it.

    Packages of which the user's name the first one are left to the user, whatever their version.
    """
    users = _listed(conf, _PACKAGES)
    theirs = {_artifact(coordinate) for coordinate in users}
    files = list(jars)
    packages: list[str] = []
    excluded: list[str] = []
    for each in needed:
        if _artifact(each.coordinates[0]) in theirs:
            continue
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


def _listed(conf: Mapping[str, str], name: str) -> list[str]:
    return [part for each in conf.get(name, "").split(",") if (part := each.strip())]


def _artifact(coordinate: str) -> str:
    """Group and artifact without the versions that are part of its name: `_4.1_2.13`."""
    group, artifact = coordinate.split(":")[:2]
    return f"{group}:{artifact.partition('_')[0]}"


def _resolved(packages: Packages) -> str:
    """The value of `spark.jars` in a session that resolves these."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    builder = builder.config(_PACKAGES, packages.name).config(_EXCLUDES, ",".join(packages.excluded))
    session = builder.getOrCreate()
    jars = session.conf.get(_JARS) or ""
    session.stop()
    return jars


def main() -> None:
    """Fetch the jars unless they are there; each set by a process of its own, as Ivy is asked when a JVM starts."""
    sets = [delta_packages(), s3_packages()]
    if len(sys.argv) > 1:
        (packages,) = (each for each in sets if each.name == sys.argv[1])
        keep_jars(packages.name, _resolved(packages))
        return
    for each in sets:
        if kept_jars(each.name) is None:
            subprocess.run([sys.executable, "-m", __spec__.name, each.name], check=True)  # noqa: S603


if __name__ == "__main__":
    main()
