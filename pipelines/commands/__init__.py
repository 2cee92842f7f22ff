"""The work of each command of `pgsieve`: one module for each command. No command prints anything.

`results` has the dataclasses that commands return. `failures` decides for which subscriptions an error ends the work.
"""
