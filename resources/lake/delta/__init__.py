"""Delta tables as pgsieve reads and writes them, each by delta-rs in this process or by Spark.

`records` is what both offer for small tables and positions, `delta_rs` and `spark` are the two, `merge` what both run. `commits` is how
delta-rs commits, `row_removal` what takes rows out of tables, `slices` how a change log is read.
"""
