"""The work of each command of `pgsieve`, one module per command. No command prints.

`results` has the dataclasses that commands return; `failures` says which subscriptions an error ends.
"""
