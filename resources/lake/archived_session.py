"""Starts a session, so that Java archives its classes for later sessions (`pgsieve.resources.lake.java.class_archive`).

In: the archive's name, as the argument. Out: the archive, which the JVM writes at its end. The session runs
each typical operation once: a Python function of Arrow batches, a Delta table, a MERGE.
"""

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from pgsieve.resources.lake.executors import begin
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.java.class_archive import archiving_options
from pgsieve.resources.lake.session import session_config
from pgsieve.resources.lake.stores.storage import storage_of
from pgsieve.resources.private_folder import private_folder

#: How long the JVM's end may take. Java writes 150 MB of classes in ten seconds, or more on a busy machine.
_END_SECONDS = 300.0


def use(session: SparkSession, table: Path) -> None:
    """Have the session load the classes that later sessions use."""
    begin(session, 2)
    session.range(4).write.format("delta").save(str(table))
    session.sql(
        f"merge into delta.`{table}` t using (select 1L as id) s on t.id = s.id when matched then delete"
        " when not matched then insert *"
    )
    session.read.format("delta").load(str(table)).groupBy("id").count().toArrow()


def main(made: Path) -> None:
    """Start the session, use it, and have the JVM end."""
    folder = private_folder()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = session_config(
        "local[*]", {jvm.JAVA_OPTIONS: archiving_options(made)}, storage_of(str(folder))
    )
    use(jvm.session(settings, _END_SECONDS), folder / "table")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
