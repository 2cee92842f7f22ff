"""Wiring: the configuration, Dagster's definitions with jobs, schedules and sensors, and the command line.

`project` makes of a configuration what the steps work on; `definitions` is what Dagster loads.
"""
