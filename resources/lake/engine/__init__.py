"""The warm engine: one local Spark Connect server that the runs of a project share, so that none of them starts a JVM.

`record` has the files by which a running engine is found, `server` the process that runs Spark's, `control`
starts, finds and ends it.
"""
