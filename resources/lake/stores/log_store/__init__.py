"""Names the Java class by which Spark commits to Delta tables on S3.

Out: the path of the jar that contains the class, the name of the class, and the setting of Spark that chooses it.
     The source of the class is `ConditionalPutLogStore.java`, which `make java` compiles.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

SOURCE = _FOLDER / "ConditionalPutLogStore.java"
JAR = _FOLDER / "pgsieve-log-store.jar"
CLASS = "pgsieve.lake.ConditionalPutLogStore"
#: Spark's setting for the log store of tables at `s3a://`.
SETTING = "spark.delta.logStore.s3a.impl"
