"""PostgreSQL's logical replication as rules on bytes and columns: no I/O, no Spark, no Dagster.

`binary` and `values` are what everything is made of, `protocol` is pgoutput, `plugins` are output plugins;
`publications` and `row_filters` decide what is sent, `checksums` whether two sides hold the same.
"""
