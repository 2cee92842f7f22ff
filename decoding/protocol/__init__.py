"""pgoutput's messages: one at a time as dataclasses, or many as columns.

`transactions` assembles a session's messages into complete transactions in commit order; `tuples` decodes
rows into typed columns.

PostgreSQL documentation, Logical Replication Message Formats.
"""
