"""pgoutput's messages (PostgreSQL documentation, 54.9): one at a time as dataclasses, or many as columns.

`transactions` assembles a slot's messages into whole transactions in commit order; `tuples` decodes rows into
typed columns.
"""
