"""The Delta lake: its paths, tables and positions, written by delta-rs in this process or by Spark.

`lake` is the entry point for the steps, and `access` checks that the lake can be used. `stores` has the
files, `delta` the tables, `session` and `engine` have Spark.
"""
