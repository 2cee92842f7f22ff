"""What each command of `pgsieve` does, a module each; without an output of its own.

`results` holds what they return, `failures` the errors by the subscriptions that they end.
"""
