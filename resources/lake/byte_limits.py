"""Names pgsieve's own settings among Spark's: limits in bytes, which `Policy` explains.

In: nothing. Out: the names of the settings, and their defaults.

Every command reads the configuration and therefore imports this module, so it has no slow imports.
"""

#: Up to this many bytes, a table's changes or rows are computed and written in this process, without Spark, if the
#: library delta-rs can reach the lake (`Policy.small_bytes`).
SMALL_BYTES_SETTING, SMALL_BYTES_DEFAULT = "spark.pgsieve.smallBytes", 8 * 1024 * 1024
#: In replicas (copies of published tables) up to this many bytes, rows are deleted by rewriting their files. In larger
#: replicas rows are mostly marked as deleted instead (`Policy.rewritten_bytes`).
REWRITTEN_BYTES_SETTING, REWRITTEN_BYTES_DEFAULT = "spark.pgsieve.rewrittenBytes", 64 * 1024 * 1024
