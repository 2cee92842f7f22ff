"""PostgreSQL's logical replication as rules on bytes and columns: no I/O, no Spark, no Dagster.

`binary` reads and writes bytes, `values` has PostgreSQL's types (add one there), `protocol` is pgoutput, `plugins` has
output plugins. `publications` decides what is sent, and as which relation: partition roots, the truth table of the
UPDATE transformation. `row_filters` evaluates WHERE clauses, `checksums` compares two sides.
"""
