"""The Delta lake: its paths, tables and positions, written by delta-rs in this process or by Spark.

`lake` is the entry point for the steps. `access` checks that the lake can be used. `stores` reads and writes
files, `delta` tables; `session` and `engine` start Spark.
"""
