"""PostgreSQL's logical replication as rules on bytes and columns: no I/O, no Spark, no Dagster.

- `binary` reads and writes bytes.
- `values` has PostgreSQL's types. A new type is added there.
- `protocol` is pgoutput.
- `plugins` has output plugins.
- `publications` decides which changes are sent, and under which relation: partition roots, and the truth
  table of the UPDATE transformation.
- `row_filters` evaluates WHERE clauses.
- `changes` decodes and transforms changes, and computes the net change of each key.
- `checksums` compares the publisher with the replica.
"""
