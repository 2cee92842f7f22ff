"""The warm engine: one local Spark Connect server that the runs of a project share, so that no run starts a JVM.

`record` has the files that describe a running engine. `server` is the engine's process, which starts Spark's.
`control` starts, uses and ends an engine.
"""
