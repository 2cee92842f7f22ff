"""Delta tables as pgsieve reads and writes them, each by delta-rs in this process or by Spark.

`records` is the interface to small tables and positions; `delta_rs` and `spark` implement it. `merge`
describes MERGEs for both. `commits` commits by delta-rs, `row_removal` removes rows from tables, `slices`
reads a change log.
"""
