"""PostgreSQL's logical replication as rules on bytes and columns: no I/O, no Spark, no Dagster."""
