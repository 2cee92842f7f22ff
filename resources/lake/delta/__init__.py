"""Reads and writes Delta tables, by delta-rs in this process or by Spark.

`records` is the interface to small tables and positions; `delta_rs` and `spark` implement it. `merge` describes
MERGEs for both engines. `commits` commits by delta-rs, `row_removal` removes rows, and `slices` reads a change
log.
"""
