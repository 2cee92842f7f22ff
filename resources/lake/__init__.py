"""The Delta lake: its paths, tables and positions, written by delta-rs in this process or by Spark.

`lake` is where the steps come in; `records`, `parquet_files` and `maintenance` are its ways to write, `session` is Spark.
"""
