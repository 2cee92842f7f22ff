"""The lake: the folder or bucket with the Delta tables, which delta-rs (a library in this process) or Spark writes.

`lake` is the module that the steps of pgsieve use. `access` checks that the lake can be used. `stores` reads and
writes files, and `delta` tables. `session` and `engine` start Spark.
"""
