"""Delta's jars, so that a session starts without asking a Maven repository for them.

In: Maven coordinates. Out: the jar files that Spark once resolved them to. Spark runs Ivy at every start of a
session with `spark.jars.packages`, even where all files are in Ivy's cache; naming the files in `spark.jars`
gives the same class path, works offline and prints nothing. Which files belong to the coordinates is known
only to Ivy (its folder of jars holds those of every package and version ever asked for), so the first
session's answer is kept beside the environment that it holds for. Run as a program, this module starts that
session. Raises nothing where the answer cannot be kept: then Ivy is asked again.

https://spark.apache.org/docs/4.1.0/configuration.html#runtime-environment (spark.jars, spark.jars.packages)
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Where the answer is kept: in the virtual environment, which is made anew when versions change.
KEPT = Path(sys.prefix) / "delta-jars.json"


def delta_jars(package: str, kept: Path = KEPT) -> list[str] | None:
    """Return the jar files of `package` and all it depends on; None if not known or no longer there."""
    try:
        jars: list[str] = json.loads(kept.read_text(encoding="utf-8"))[package]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return jars if all(Path(jar).is_file() for jar in jars) else None


def keep_jars(package: str, spark_jars: str, kept: Path = KEPT) -> None:
    """Keep what Spark made of `package`: the value of `spark.jars` in a session that resolved nothing else."""
    jars = [unquote(urlsplit(uri).path) for uri in spark_jars.split(",")]
    with suppress(OSError):
        kept.write_text(json.dumps({package: jars}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Fetch the jars unless they are there."""
    from pgsieve.resources.lake.session import SparkEngine, delta_package

    package = delta_package()
    if delta_jars(package) is None:
        session = SparkEngine(master="local[1]").session
        keep_jars(package, session.conf.get("spark.jars") or "")
        session.stop()


if __name__ == "__main__":
    main()
