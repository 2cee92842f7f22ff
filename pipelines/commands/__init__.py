"""What each command of `pgsieve` does, one module per command. No command prints.

`results` has the dataclasses that they return, `failures` the errors with the subscriptions that they end.
"""
