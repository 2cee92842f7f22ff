"""Gives a Spark session settings for a block, and saves rows without the settings of such a block.

In: a session, and settings, such as those of a MERGE; or a writer of rows, a table and the commit.
Out: within the block, the session with these settings; or the rows in the table.

A MERGE has no options of its own, so Delta reads its position and metadata from the session. All threads share them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Condition

from pyspark.sql import DataFrameWriter, SparkSession

from pgsieve.resources.lake.delta.records import APPLICATION_ID, Commit


class _SettingsLock:
    """Lets blocks run at the same time only if they need the same settings of the same session.

    A session has its settings for all threads.
    """

    def __init__(self) -> None:
        self._condition, self._blocks = Condition(), list[tuple[SparkSession, Mapping[str, str]]]()

    @contextmanager
    def hold(self, spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
        """Give the session these settings for the block. Blocks with other settings have to end first."""
        with self._condition:
            self._condition.wait_for(
                lambda: all(held == settings for session, held in self._blocks if session is spark)
            )
            self._blocks.append((spark, settings))
        try:
            for name, value in settings.items():
                spark.conf.set(name, value)
            yield
        finally:
            with self._condition:
                self._blocks.remove((spark, settings))
                if not any(session is spark for session, _ in self._blocks):
                    # If the session is lost, this raises an error. The waiting blocks go on, and meet the same error.
                    try:
                        for name in settings:
                            spark.conf.unset(name)
                    finally:
                        self._condition.notify_all()


#: Gives a session settings for a block. Such a block must not contain another one.
hold_settings = _SettingsLock().hold


def save(spark: SparkSession, writer: DataFrameWriter, path: str, commit: Commit) -> None:
    """Save rows in a table, with the metadata of a commit. If the commit has a position, Delta makes it once per position.

    A commit without a position waits for the MERGEs of the session. From its settings it would get the position of a
    MERGE. Then the MERGE of its own table at that position would be left out.
    """
    writer = writer.option("userMetadata", commit.user_metadata)
    if commit.position is None:
        with hold_settings(spark, {}):
            writer.save(path)
    else:
        writer.options(txnAppId=APPLICATION_ID, txnVersion=str(commit.position)).save(path)
