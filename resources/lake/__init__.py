"""The Delta lake: its paths, tables and positions, written by delta-rs in this process or by Spark.

`lake` is where the steps come in, and `access` whether they may; `stores` are the files, `delta` the tables, `session` and `engine`
Spark.
"""
