"""Spark's daemon of Python workers in a local session: imports pgsieve's modules, and then forks workers.

Spark starts this module instead of `pyspark.daemon`, with the same argument. Otherwise each worker, one per
core, would import the modules itself, which takes a second in the first job.

https://spark.apache.org/docs/4.1.0/configuration.html#runtime-environment (spark.python.daemon.module)
"""

import gc
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

#: The modules whose functions workers run. A worker imports further modules itself.
_MODULES = (
    "pgsieve.assets.steps.initial_sync.rows",
    "pgsieve.assets.steps.update_transformation.changes",
    "pgsieve.assets.steps.apply.by_files",
)


def _import_installed_pyspark() -> None:
    """Make Python import pyspark from its installed package, not from the archive in that package.

    Spark puts the archive first in the path, and Python would compile the archive's modules at each start.
    """
    other_paths = [path for path in sys.path if not path.endswith(".zip")]
    installed = PathFinder.find_spec("pyspark", other_paths)
    if installed is not None and installed.origin is not None:
        package = Path(installed.origin).parent
        sys.path[:] = [path for path in sys.path if package not in Path(path).parents]


def main() -> None:
    """Import the modules, then fork workers until Spark ends this process."""
    _import_installed_pyspark()
    for name in _MODULES:
        with suppress(ImportError):
            import_module(name)
    from pyspark.daemon import manager

    # After each task a worker collects garbage. The objects of the modules stay, so it need not visit them.
    gc.freeze()
    manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
