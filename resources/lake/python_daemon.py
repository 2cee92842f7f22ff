"""Spark's daemon of Python workers in a local session: it imports pgsieve's modules before it forks a worker.

Spark starts it as `pyspark.daemon`, with the same argument. Without it each worker, one per core, imports all
of them by itself: a second each at the first job.

https://spark.apache.org/docs/4.1.0/configuration.html#runtime-environment (spark.python.daemon.module)
"""

from contextlib import suppress
from importlib import import_module

from pyspark.daemon import manager

#: The modules whose functions workers run; a worker imports what else it needs.
_NEEDED = (
    "pgsieve.assets.steps.initial_sync.rows",
    "pgsieve.assets.steps.update_transformation.changes",
    "pgsieve.assets.steps.apply.by_files",
)


def main() -> None:
    """Import, then fork workers until Spark ends it."""
    for name in _NEEDED:
        with suppress(ImportError):
            import_module(name)
    manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
