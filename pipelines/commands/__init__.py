"""The work of the commands of `pgsieve`, usually one module for each command. None of them prints a result.

`results` has the dataclasses that commands return. `failures` decides for which subscriptions an error ends the work.
"""
