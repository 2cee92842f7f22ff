"""The daemon of Python workers in a local Spark session: imports pgsieve's modules, and then forks workers.

Spark starts this module instead of its own daemon `pyspark.daemon`, with the same argument. With Spark's own
daemon, each worker would import pgsieve's modules itself. There is one worker per core, and the imports take a
second in the first job.

https://spark.apache.org/docs/4.1.0/configuration.html#runtime-environment (spark.python.daemon.module)
"""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

from pgsieve.resources.processes import keep_freed_arrays

#: The modules that have the functions which workers run. If a worker needs other modules, it imports them itself.
_MODULES = (
    "pgsieve.assets.steps.initial_sync.rows",
    "pgsieve.assets.steps.update_transformation.changes",
    "pgsieve.assets.steps.apply.by_files",
)

#: The setting of Arrow's allocator that says after how many milliseconds it returns freed memory to the system. It is
#: an environment variable, which the allocator reads when Arrow is loaded.
PURGE_DELAY = "MIMALLOC_PURGE_DELAY"
#: Workers return no memory, because their next task needs it again, and page faults would take a sixth of their time.
#: A worker's memory grows to that of its largest task. Spark ends a worker that had no task for a minute.
WORKER_PURGE_DELAY = "-1"


def _import_installed_pyspark() -> None:
    """Make Python import pyspark from the installed package, and not from the archive that this package contains.

    Spark puts the archive first in the path. From an archive Python would compile the modules again at each start.
    """
    other_paths = [path for path in sys.path if not path.endswith(".zip")]
    installed_spec = PathFinder.find_spec("pyspark", other_paths)
    if installed_spec is not None and installed_spec.origin is not None:
        package = Path(installed_spec.origin).parent
        sys.path[:] = [path for path in sys.path if package not in Path(path).parents]


def main() -> None:
    """Import the modules. Then fork workers until Spark ends this process."""
    os.environ[PURGE_DELAY] = WORKER_PURGE_DELAY
    keep_freed_arrays()
    _import_installed_pyspark()
    for name in _MODULES:
        with suppress(ImportError):
            import_module(name)
    from pyspark.daemon import manager

    # After each task a worker collects garbage. The objects of the imported modules stay, so the collector
    # need not visit them.
    gc.freeze()
    manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
