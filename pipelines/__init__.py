"""Wiring: the configuration, Dagster's definitions with jobs, schedules and sensors, and the command line.

`project` turns a configuration into the feeds and subscriptions that the steps work on. Dagster loads
`definitions`. `commands` has a module for each command. `following` has `pgsieve run --follow`, `demo` has
`pgsieve demo`.
"""
