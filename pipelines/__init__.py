"""The outermost layer of pgsieve: the configuration, the command line, and Dagster's jobs, schedules and sensors.

- `config` reads pgsieve.yaml
- `project` reads the configuration, and makes the slot streams and subscriptions on which a run works. A slot stream is
  a replication slot with the subscriptions that read it.
- `definitions` is the module that Dagster loads
- `commands` has a module for each command of `pgsieve`, and `command_line` prints their results
- `following` has `pgsieve run --follow`, and `demo` has `pgsieve demo`
"""
