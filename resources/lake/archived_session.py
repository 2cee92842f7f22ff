"""Starts a Spark session once, so that Java writes an archive of the classes that the session has loaded.

Later sessions load their classes from the archive, and start faster (`pgsieve.resources.lake.java.class_archive`).

In: the path of the archive, as the argument of the program.
Out: the archive, which the JVM writes when it ends.

The session runs each typical operation once: a Python function of Arrow batches, a write to a Delta table, a MERGE,
and a query of the table.
"""

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.java.class_archive import make_archive_writing_options
from pgsieve.resources.lake.runners import run_first_job
from pgsieve.resources.lake.spark_settings import make_session_config
from pgsieve.resources.lake.stores.storage import find_storage
from pgsieve.resources.private_folder import private_folder

#: How long the JVM may take to end. Java writes 150 MB of classes in ten seconds, but takes longer on a busy
#: machine.
_END_SECONDS = 300.0


def load_classes(session: SparkSession, table: Path) -> None:
    """Make the session load the classes that later sessions need. `table` is the path where a Delta table can be created."""
    run_first_job(session, 2)
    session.range(4).write.format("delta").save(str(table))
    session.sql(
        f"merge into delta.`{table}` t using (select 1L as id) s on t.id = s.id when matched then delete"
        " when not matched then insert *"
    )
    session.read.format("delta").load(str(table)).groupBy("id").count().toArrow()


def main(archive: Path) -> None:
    """Start the session, and make it load the classes. The JVM ends with this process."""
    folder = private_folder()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = make_session_config(
        "local[*]", {jvm.JAVA_OPTIONS: make_archive_writing_options(archive)}, find_storage(str(folder))
    )
    load_classes(jvm.start_session(settings, _END_SECONDS), folder / "table")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
