"""The warm engine: a local Spark Connect server that keeps running, so that the runs of a project need not start a JVM.

`record` manages the files that describe a running engine. `server` is the program of the engine's process, which
starts the process of Spark. `control` starts an engine, uses it and ends it.
"""
