"""The warm engine: one local Spark Connect server that the runs of a project share, so that none of them starts a JVM.

`record` is what a running engine tells of itself in a folder, `server` the process that looks after Spark's, `control`
starts, finds and ends it.
"""
