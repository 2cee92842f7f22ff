"""The outside world: PostgreSQL, Spark, the Delta lake, the embedded server."""
