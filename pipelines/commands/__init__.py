"""The work of each command of `pgsieve`, one module per command. No command prints.

`results` has the dataclasses that they return, `failures` the errors with the subscriptions that they end.
"""
