"""The Java class with which Spark commits to Delta tables on S3, and its jar.

Out: the jar's path, the class's name, and the setting that chooses it. The source is
`ConditionalPutLogStore.java`; `make java` compiles it.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

SOURCE = _FOLDER / "ConditionalPutLogStore.java"
JAR = _FOLDER / "pgsieve-log-store.jar"
CLASS = "pgsieve.lake.ConditionalPutLogStore"
#: Spark's setting for the log store of tables at `s3a://`.
SETTING = "spark.delta.logStore.s3a.impl"
