"""PostgreSQL's logical replication as functions on bytes and columns, without I/O, Spark or Dagster.

- `binary` reads and writes bytes.
- `values` converts values of PostgreSQL's types.
- `protocol` decodes and encodes pgoutput's messages.
- `plugins` has output plugins.
- `publications` decides which changes are sent, and as which relation.
- `row_filters` parses and evaluates WHERE clauses.
- `changes` decodes and transforms changes, and computes the net change of each key.
- `checksums` computes checksums of rows as the publisher does.
"""
