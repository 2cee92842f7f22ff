"""Reads and writes Delta tables, either by delta-rs in this process, or by Spark.

`records` is the interface to small tables, and to the positions of all tables (the LSNs up to which they have all
changes); `delta_rs` and `spark` implement it. `merge` describes MERGEs for both engines. `commits` makes commits by
delta-rs, `row_removal` removes rows, and `slices` reads a change log, which has the raw messages of a slot.
"""
