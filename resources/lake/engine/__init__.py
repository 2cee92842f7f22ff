"""The warm engine: one local Spark Connect server that the runs of a project share, so that none of them starts a JVM.

`record` has the files that describe a running engine. `server` is the engine's process, which starts Spark's.
`control` starts, finds and ends an engine.
"""
